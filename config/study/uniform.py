# What the others are compared with: one MLP a layer, equally wide at every depth.
ffn = 'standard'

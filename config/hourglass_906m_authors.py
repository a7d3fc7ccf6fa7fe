# The authors' own 906M hourglass (Liao et al., arXiv 2602.06471, in a later version): d_model 2496, 12 layers, 16 heads
# of 96, K 4, d_h 2016. So d_h / d_model is 0.81, and attention is narrower than the stream. Mixers and FFNs have 0.293%
# more parameters than those of standard_906m; hourglass_906m has exactly as many, in a shape of ours.
# 18.0B tokens (20 a parameter), 1.2e20 FLOPs. The recipe is the authors': 4.2M tokens a step, the warm-up, learning
# rates, initial weights of 0.02 at every depth, and the base of the rotary embeddings, which they also rescale. Their
# norms have gains, of queries and keys too, and an eps of 1e-5; ours have no gains, and 1e-6.
out_dir = 'out-hourglass_906m_authors'
dataset = 'fineweb100B'
vocab_size = 50257
block_size = 4096
batch_size = 4
gradient_accumulation_steps = 256  # 4.2 million tokens a step

n_layer = 12
n_head = 16
head_dim = 96
n_embd = 2496
ffn_width = 8064
ffn = 'hourglass'
n_mlp = 4
qk_norm = True
rope_theta = 500000.0

init_std = 0.02
init_scaled = False
learning_rate = 2.5e-4
min_lr = 6e-5
warmup_iters = 25
max_iters = 4297
eval_interval = 200
eval_tokens = 10485760

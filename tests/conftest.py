import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path):
    """Run a script of the repository in a folder of its own: run('train.py', '--max_iters=3', processes=2)."""
    def run(script, *args, processes=0, status=0, env=None, cwd=None, timeout=120):
        torchrun = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={processes}'] if processes else []
        env = {**os.environ, 'OMP_NUM_THREADS': '1', **(env or {})}
        done = subprocess.run([sys.executable, *torchrun, str(ROOT / script), *args], cwd=cwd or tmp_path, env=env,
                              capture_output=True, text=True, timeout=timeout)
        assert done.returncode == status, f'{script} {args} left with {done.returncode}:\n{done.stdout}\n{done.stderr}'
        return done
    return run

import torch

# The models here are tiny: a second thread costs each operation more than it gives.
torch.set_num_threads(1)

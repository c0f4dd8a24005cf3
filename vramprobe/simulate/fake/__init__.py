"""Fake tensors: what a program on them allocates, operator by operator.

In: a program under FakeTensorMode. Out: allocations and frees in order; stand-ins for what bitsandbytes, peft and Liger
run natively. Loads torch.
"""

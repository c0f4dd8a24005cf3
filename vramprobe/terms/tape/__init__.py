"""The tape: values, autograd's graph and an allocator's requests, by size alone. Knows no model.

In: sizes and dtypes. Out: live bytes by cause, and allocations and frees in order. No torch here. Read in this order:
sizes (polynomials in batch size and sequence length), graph, tape, layout, scratch (workspaces), request_log,
micro_steps (gradient accumulation).
"""

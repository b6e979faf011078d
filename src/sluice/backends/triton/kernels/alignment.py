"""Pointers that begin anywhere: kernels are told nothing of their alignment."""

from __future__ import annotations

INDICES = ["slots_ptr", "write_slots_ptr", "has_state_ptr", "cu_seqlens_ptr"]
INDICES += ["checkpoint_slots_ptr", "checkpoint_positions_ptr"]
INDICES += ["window_start_ptr", "draft_slots_ptr"]
"""Index tensors are often slices of a scheduler's tensors and begin anywhere: no kernel is
specialised on their alignment (``do_not_specialize_on_alignment``)."""
GATES = ["g_ptr", "beta_ptr", "A_log_ptr", "dt_bias_ptr"]
"""The same for gates per head, a few numbers per token."""

"""What ``sglang_engine`` writes between SGLang's lines."""

READY = "made ready:"
"""Before the name of a kernel that is compiled, or taken from the disk."""
ASKED = "asked for round"
"""Before the number of a round of requests."""

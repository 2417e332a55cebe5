"""Operations on tensors, each a torch reference with the seam for a Triton kernel."""

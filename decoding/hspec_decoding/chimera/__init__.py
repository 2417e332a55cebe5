"""Chimera (Zeng et al., arXiv 2402.15758), repaired: a draft model of one block over the target's own states.

What it keeps of the paper: the trigram encoder on the target's embeddings, one block that sees the context, residual
decoding heads. What later work taught it: states of three of the target's layers (EAGLE-3, arXiv 2503.01840), every
drafted token conditioned on its own branch (Hydra, arXiv 2402.05109), a head of the frequent tokens only (FR-Spec,
arXiv 2502.14856), and a window with sinks, so that it does not fail beyond the length it was trained at.
"""

"""Training of draft models by self-distillation: a frozen target makes the text, and says what it expected in it.

texts.py      turns and prompts: what the target is asked to continue
sampler.py    the target's own text, many rows at once
corpus.py     that text on disk, in shards; which rows are held out; batches
target.py     what the target says of a batch; a checksum of its weights
depths.py     Chimera's loss: a training-time test over all depths
streaming.py  the loss of a small Llama that drafts by itself
trainer.py    the loop: optimizer, schedule, checkpoints, figures
"""

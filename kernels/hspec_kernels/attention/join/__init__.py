"""The join of parts of an attention by their log-sum-exps."""

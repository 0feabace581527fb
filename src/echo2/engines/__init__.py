"""Engines: token ids in, token ids out, with logprobs, under weights that change while they sample."""

"""Weights: a policy as content-addressed bytes. `manifest` names them, `segments` encodes one segment, `encoder` makes
a payload, `content` applies payloads, `chain` joins payloads without reading them, `store` keeps chunks, `kept` is a
worker's content in memory and on disk.
"""

"""Weights: a policy as content-addressed bytes. `manifest` names them, `segments` codes one piece, `encoder` makes a
payload, `content` is made of payloads, `chain` joins payloads without reading any, `store` keeps chunks, `kept` is a
worker's content in memory and on disk."""

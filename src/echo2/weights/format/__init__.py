"""What a snapshot is: manifest, tensors in segments, encodings, and the files beside them."""

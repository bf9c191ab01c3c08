"""File names inside a model artifact. Torch-free, so that the API and the workers can read them too.

An artifact is a Hugging Face model directory with these files added.
"""

MANIFEST = "manifest.json"  # lineage, metrics and a SHA-256 for each file; written last
HEADS_FILE = "heads.json"  # labels, type and pooling of each head
HEADS_WEIGHTS = "classifier_heads.safetensors"
PREDICTIONS = (
    "predictions.parquet"  # of the model, its teacher and its baseline, for the held-out texts
)
GOLDEN = "golden.json"  # texts and the logits that the trained model gave them

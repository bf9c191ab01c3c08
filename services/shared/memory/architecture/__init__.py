"""Model architectures: dimensions, parameters, presets, Hugging Face configs, safetensors headers."""

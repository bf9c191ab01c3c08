"""Quantization to 8 bits: calibration, quality gate, weights file, background quantization."""

"""Models and datasets by their ids on Hugging Face's hub, or ModelScope's."""

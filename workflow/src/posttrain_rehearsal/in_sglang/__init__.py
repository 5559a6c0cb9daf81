"""What runs in SGLang's environment, started as a folder: its files import each other, and nothing else of ours."""

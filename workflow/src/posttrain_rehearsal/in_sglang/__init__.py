"""A script folder that runs in SGLang's environment; its files import only each other and posttrain_weights."""

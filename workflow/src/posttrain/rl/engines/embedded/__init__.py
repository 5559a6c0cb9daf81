"""The embedded engine: SGLang's endpoints over the `transformers` model, where SGLang cannot run it.

    python -m posttrain.rl.engines.embedded --model-path DIR --host 127.0.0.1 --port 30000 --served-threads 2

What it keeps of SGLang is the protocol: /generate with token log-probabilities and a weight version, weight
updates, pause and abort. What it does not have is SGLang's scheduler: a batch runs from its prefill to its
last token, and then the next one starts.

One difference is deliberate: a weight update is collected beside the weights that serve and put in their
place as a whole at /end_weight_update. An update that lacks a tensor, or that failed half-way, never serves.

    __main__    the command line: the port is bound before anything slow is imported
    server      HTTP in and out
    requests    a request body becomes rows, or is refused with a reason
    openai_endpoints, openai_requests
                the same in OpenAI's words: /v1/completions, /v1/chat/completions
    texts       the checkpoint's tokenizer, for these alone
    worker      the thread that runs batches; pause, abort, and the moment at which weights may change
    generation  prefill and decode of one batch
    sampling    a token from its row's own random numbers
    stable_topk ties of the indexer's top-k go to the lower position
    model       config.json and shards become a transformers model
    weights     Hub names and the model's parameters; the set that serves and the set an update fills
"""

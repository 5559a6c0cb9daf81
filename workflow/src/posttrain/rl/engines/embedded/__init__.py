"""The embedded engine: SGLang's endpoints over a `transformers` model, for machines where SGLang cannot run it.

    python -m posttrain.rl.engines.embedded --model-path DIR --host 127.0.0.1 --port 30000 --served-threads 2

It implements SGLang's protocol: /generate with token log-probabilities and a weight version, weight updates,
pause and abort. It has no continuous batching: a batch runs from prefill to its last token before the next
one starts.

One difference is deliberate: a weight update is collected in a second set of tensors and swapped in as a whole
at /end_weight_update. An update that lacks a tensor or failed midway is never served.

    __main__    the command line: the port is bound before anything slow is imported
    server      HTTP endpoints
    requests    a request body becomes rows, or is refused with a reason
    openai_endpoints, openai_requests
                the same for OpenAI's API: /v1/completions, /v1/chat/completions
    texts       the checkpoint's tokenizer, used only by the OpenAI endpoints
    worker      the thread that runs batches; pause, abort, and when weights may change
    generation  prefill and decode of one batch
    sampling    samples a token with the row's own random numbers
    stable_topk breaks ties of the indexer's top-k in favour of the lower position
    model       loads config.json and shards as a transformers model
    weights     maps Hub names to parameters; the serving set and the set that an update fills
"""

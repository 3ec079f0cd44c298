"""Servers that bench/serve.py measures Regard's against, each in a process of its own: LitServe around Hugging Face's
generate or Regard's translator, and CTranslate2's asynchronous translator behind Starlette."""

import argparse
import json
import os
from functools import partial
from typing import Any

try:
    from litserve import LitAPI
except ImportError:
    LitAPI = object

EXAMPLES = """examples (bench/serve.py starts them):
  python bench/serve_peers.py litserve-generate models/gpt2 8001
  python bench/serve_peers.py litserve-translate runs/translate 8001
  python bench/serve_peers.py ctranslate2 models/fast 8001
"""
BATCH, PATIENCE = 16, 0.02  # requests of a batch, seconds that it waits for more


class Generating(LitAPI):
    """Hugging Face's generate over a batch of prompts, padded on the left."""

    folder = ""

    def setup(self, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def decode_request(self, request: dict[str, Any]) -> tuple[str, int]:
        return request["prompt"], request["max_tokens"]

    def predict(self, inputs: list[tuple[str, int]]) -> list[str]:
        import torch

        batch = self.tokenizer([text for text, _ in inputs], padding=True, return_tensors="pt")
        with torch.inference_mode():
            most = max(tokens for _, tokens in inputs)
            pad = self.tokenizer.pad_token_id
            ids = self.model.generate(**batch, max_new_tokens=most, do_sample=False, pad_token_id=pad)
        new = ids[:, batch["input_ids"].shape[1] :]
        return [self.tokenizer.decode(row[:most]) for row, (_, most) in zip(new, inputs, strict=True)]

    def encode_response(self, output: str) -> dict[str, Any]:
        return {"choices": [{"text": output}]}


class Translating(LitAPI):
    """Regard's translator over a batch of texts."""

    folder = ""

    def setup(self, device: str) -> None:
        from regard.tasks.translate.translator import Translator

        self.translator = Translator.load(self.folder, device="cpu")

    def decode_request(self, request: dict[str, Any]) -> str:
        return request["text"]

    def predict(self, inputs: list[str]) -> list[str]:
        return [best[0].text for best in self.translator.translate(inputs)]

    def encode_response(self, output: str) -> dict[str, Any]:
        return {"translations": [{"text": output}]}


def lit(kind: type[Any], folder: str, port: int) -> None:
    import litserve

    api = kind(max_batch_size=BATCH, batch_timeout=PATIENCE)
    api.folder = folder
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(port=port, host="127.0.0.1", generate_client_file=False, log_level="error")


def ctranslate2(folder: str, port: int) -> None:
    import ctranslate2
    import tokenizers
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    # workers of a thread each, which take calls as they come
    workers = int(os.environ.get("OMP_NUM_THREADS", "1"))
    options = {"inter_threads": workers, "intra_threads": 1, "compute_type": "float32"}
    translator = ctranslate2.Translator(folder, device="cpu", **options)

    async def translate(request: Request) -> JSONResponse:
        text = json.loads(await request.body())["text"]
        tokens = tokenizer.encode(text, add_special_tokens=False).tokens
        (coming,) = translator.translate_batch([tokens], beam_size=5, asynchronous=True)
        found = (await run_in_threadpool(coming.result)).hypotheses[0]
        return JSONResponse({"translations": [{"text": tokenizer.decode([tokenizer.token_to_id(t) for t in found])}]})

    app = Starlette(routes=[Route("/translate", translate, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


PEERS = {
    "litserve-generate": partial(lit, Generating),
    "litserve-translate": partial(lit, Translating),
    "ctranslate2": ctranslate2,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("folder")
    parser.add_argument("port", type=int)
    arguments = parser.parse_args()
    PEERS[arguments.peer](arguments.folder, arguments.port)


if __name__ == "__main__":
    main()

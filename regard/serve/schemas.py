"""The bodies that requests may have, as JSON Schema, and the API as OpenAPI."""

from typing import Any

from regard import __version__
from regard.serve.limits import Limits
from regard.serve.served import Ability, Runs

CHARACTERS = 1 << 20  # of a prompt; the context bounds its tokens
STOPS, STOP_LENGTH = 4, 100
LOGPROBS = 5
Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
MODEL: Schema = {"type": "string", "minLength": 1, "maxLength": 200}


def optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def number(low: float, high: float) -> Schema:
    return optional({"type": "number", "minimum": low, "maximum": high})


def whole(low: int, high: int) -> Schema:
    return optional({"type": "integer", "minimum": low, "maximum": high})


def several(item: Schema, most: int) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": most}


def body(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def schemas(limits: Limits) -> dict[str, Schema]:
    """The bodies of the routes."""
    text: Schema = {"type": "string", "maxLength": CHARACTERS}
    short: Schema = {"type": "string", "maxLength": limits.characters}
    ids = several({"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, limits.context)
    stop: Schema = {"type": "string", "minLength": 1, "maxLength": STOP_LENGTH}
    flag, nothing = optional({"type": "boolean"}), number(0, 0)
    texts: Schema = {"anyOf": [short, several(short, limits.texts)]}
    completion = {
        "model": MODEL,
        "prompt": {"anyOf": [text, several(text, limits.prompts), ids, several(ids, limits.prompts)]},
        "max_tokens": whole(0, limits.context),
        "temperature": number(0, 2),
        "top_p": number(0, 1),
        "top_k": whole(1, 2**31 - 1),
        "min_p": number(0, 1),
        "n": whole(1, limits.samples),
        "best_of": whole(1, limits.samples),
        "stream": flag,
        "stream_options": optional(body({"include_usage": flag})),
        "logprobs": whole(0, LOGPROBS),
        "echo": flag,
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": STOPS}, NULL]},
        "seed": whole(-(2**63), 2**63 - 1),
        "presence_penalty": nothing,
        "frequency_penalty": nothing,
        "logit_bias": optional(body({})),
        "suffix": NULL,
        "user": optional({"type": "string", "maxLength": 256}),
    }
    return {
        "/v1/completions": body(completion, "model", "prompt"),
        "/v1/embeddings": body(
            {
                "model": MODEL,
                "input": texts,
                "encoding_format": optional({"type": "string", "enum": ["float", "base64"]}),
                "user": optional({"type": "string", "maxLength": 256}),
            },
            "model",
            "input",
        ),
        "/translate": body({"model": MODEL, "text": texts, "beam": whole(1, 16), "nbest": whole(1, 16)}, "text"),
        "/classify": body({"model": MODEL, "text": texts}, "text"),
        "/fill": body({"model": MODEL, "text": texts, "top": whole(1, 100)}, "text"),
    }


ABOUT: dict[str, tuple[Ability, str]] = {
    "/v1/completions": ("complete", "continue prompts, as OpenAI's API does"),
    "/v1/embeddings": ("embed", "vectors of texts, as OpenAI's API gives them"),
    "/translate": ("translate", "translate texts"),
    "/classify": ("classify", "the label of texts, with the probability of each"),
    "/fill": ("fill", "fill the gaps, marked [mask], of texts"),
}
FETCHED = {
    "/v1/models": "the runs that are served",
    "/v1/models/{model}": "one of the runs that are served",
    "/healthz": "whether the process is alive",
    "/readyz": "whether requests are taken",
    "/metrics": "counters and gauges for Prometheus",
    "/openapi.json": "this description",
}
ERRORS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503, 504)


def openapi(runs: Runs, limits: Limits, needs_key: bool) -> dict[str, Any]:
    """The API as OpenAPI 3.1: the routes that the runs served here can answer."""
    fields = {name: {"type": "string"} for name in ("message", "type")}
    fields |= {name: optional({"type": "string"}) for name in ("param", "code")}
    told = {"type": "object", "properties": {"error": {"type": "object", "properties": fields}}, "required": ["error"]}
    error = {"description": "the reason, in words", "content": {"application/json": {"schema": told}}}
    errors = {str(code): error for code in ERRORS}
    paths: dict[str, Any] = {}
    for path, schema in schemas(limits).items():
        ability, about = ABOUT[path]
        if not runs.can(ability):
            continue
        kinds = ["application/json", *(["text/event-stream"] if ability == "complete" else [])]
        paths[path] = {
            "post": {
                "operationId": ability,
                "summary": about,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": about, "content": {kind: {} for kind in kinds}}, **errors},
            }
        }
    for path, about in FETCHED.items():
        kind = "text/plain" if path in ("/metrics", "/healthz", "/readyz") else "application/json"
        fetched: dict[str, Any] = {
            "summary": about,
            "responses": {"200": {"description": about, "content": {kind: {}}}, **errors},
        }
        if "{model}" in path:
            fetched["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": MODEL}]
        paths[path] = {"get": fetched}
    found = {"openapi": "3.1.0", "info": {"title": "Regard", "version": __version__}, "paths": paths}
    if needs_key:
        found["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"key": []}]
    return found

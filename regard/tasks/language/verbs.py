"""The verbs of language models, generate and prompt, and their flags of evaluate."""

import argparse
import json
from typing import Any

from regard.tasks.command import (
    AddVerb,
    EvaluationFlags,
    add_model,
    add_run,
    counted,
    evaluated_documents,
    notice,
    write_out,
)

# here, so that `regard train --help` does not import PyTorch
ABOUT = "A language model (GPT), trained on running text: a decoder with any attention."
EXAMPLES = (
    "regard train language --data.text shakespeare.txt --data.tokenizer characters --out runs/shakespeare",
    "regard train language --data.text books/ --data.vocabulary 16000 --model.preset gpt2 --data.length 1024",
    "regard train language --data.text train.txt.xz --data.valid valid.txt.xz --model.attention performer",
    "regard train language --data.text mails.txt.gz --data.documents blank --data.apart true --model.preset modern",
    "regard train language --config runs/shakespeare/config.yaml --out runs/b --training.seed 2",
    "regard train language --init runs/gpt2 --data.text mine/ --training.learning_rate 3e-5 --out runs/mine",
)
EVALUATION = "loss, perplexity, bits per character and byte, word perplexity"


def add_verbs(verb: AddVerb) -> None:
    _add_generate(verb)
    _add_prompt(verb)


def _add_generate(verb: AddVerb) -> None:
    added = verb(
        "generate",
        generate,
        "continue a text: an argument, or standard input",
        [
            'regard generate runs/language "Once upon a time" --maximum 200 --temperature 0.8 --top-k 40',
            'regard generate runs/language "ROMEO:" --n 3 --seed 7 --min-p 0.05 --stop "JULIET:"',
            "regard generate runs/language < story.txt",
            "regard generate runs/language --lines --json < prompts.txt > texts.jsonl",
        ],
    )
    add_run(added)
    added.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue (default: standard input)")
    add_model(added)
    added.add_argument("--maximum", type=int, default=256, help="most tokens to generate (default: 256)")
    added.add_argument(
        "--temperature", type=float, default=0.8, help="sampling temperature; 0: the most probable token (default: 0.8)"
    )
    added.add_argument("--top-k", type=int, help="sample from the k most probable tokens")
    added.add_argument("--top-p", type=float, help="sample from the fewest tokens that have this probability together")
    added.add_argument(
        "--min-p", type=float, help="sample from tokens with at least this fraction of the highest probability"
    )
    added.add_argument(
        "--repetition",
        type=float,
        default=1.0,
        help="repetition penalty; above 1, repeats are rarer (default: 1)",
    )
    added.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; can be given several times"
    )
    added.add_argument("--n", type=int, default=1, help="number of texts to generate (default: 1)")
    added.add_argument("--seed", type=int, default=0, help="random seed of the sampling (default: 0)")
    added.add_argument(
        "--slide", action="store_true", help="after the last position, continue from the last half of the context"
    )
    added.add_argument("--lines", action="store_true", help="treat every line of standard input as a prompt")
    added.add_argument("--json", action="store_true", help="print a JSON object per text")


def _add_prompt(verb: AddVerb) -> None:
    added = verb(
        "prompt",
        prompt,
        "measure few-shot accuracy: a language model answers questions after some solved examples",
        [
            "regard prompt runs/language --task task.yaml --shots 0,1,5 --draws 10",
            "regard prompt runs/language --task task.yaml --shots 2 --show",
        ],
    )
    add_run(added)
    added.add_argument(
        "--task", required=True, metavar="FILE", help="YAML file of prompt, answer, choices, examples and queries"
    )
    added.add_argument("--shots", default="0", help="numbers of examples to compare, such as 0,1,5 (default: 0)")
    added.add_argument("--draws", type=int, default=5, help="random draws of examples for each number (default: 5)")
    added.add_argument("--seed", type=int, default=0, help="random seed of the draws (default: 0)")
    added.add_argument("--show", action="store_true", help="print the prompt of the first query, and stop")
    added.add_argument("--json", action="store_true", help="print one JSON object")
    add_model(added)


def generate(arguments: argparse.Namespace) -> None:
    """regard generate"""
    from regard.data.text import opened, read_sentences, shown
    from regard.decoding import DecodingConfig
    from regard.tasks.language import LanguageModel

    language = LanguageModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    if arguments.prompt is not None and arguments.lines:
        raise ValueError("--lines takes the prompts from standard input: leave the prompt out")
    if arguments.n < 1:
        raise ValueError(f"--n must be at least 1, got {arguments.n}")
    if not arguments.temperature >= 0:
        raise ValueError(f"--temperature must be at least 0 (the most probable token), got {arguments.temperature}")
    greedy = arguments.temperature == 0
    if greedy and arguments.n > 1:
        raise ValueError("--temperature 0 always gives the same text: leave --n out, or raise the temperature")
    cuts = {name: getattr(arguments, name) for name in ("top_k", "top_p", "min_p")}
    if greedy and any(value is not None for value in cuts.values()):
        raise ValueError("--top-k, --top-p and --min-p are for sampling: give a --temperature above 0")
    sampling: dict[str, Any] = {"beam": 1} if greedy else {"sample": True, "temperature": arguments.temperature, **cuts}
    decoding = DecodingConfig(
        nbest=arguments.n,
        minimum=0,
        maximum=arguments.maximum,
        repetition=arguments.repetition,
        seed=arguments.seed,
        **sampling,
    )
    if arguments.prompt is not None:
        prompts = [arguments.prompt]
    else:
        with opened("-") as stream:
            lines = list(read_sentences(stream, name=shown("-"), longest=1 << 31))
        prompts = lines if arguments.lines else ["\n".join(lines)]
    # a single text is shown while it is generated
    live = arguments.n == 1 and not arguments.json and len(prompts) == 1
    for number, prompt in enumerate(prompts):
        before = [prompt]  # written with the first piece of text, so that a refused prompt is not written

        def show(sample: int, text: str, before: list[str] = before) -> None:
            write_out("".join(before) + text)
            before.clear()

        found = language.generate(
            prompt,
            decoding,
            stop=arguments.stop or (),
            slide=arguments.slide,
            on_text=show if live else None,
        )
        for part in found:
            if arguments.json:
                record = {"prompt": prompt, "text": part.text, "tokens": len(part.ids), "logprob": part.logprob}
                print(json.dumps(record | {"ended": part.ended}, ensure_ascii=False), flush=True)
            elif live:
                write_out("".join(before) + "\n")
            else:
                print(("" if number == 0 and part is found[0] else "----\n") + prompt + part.text, flush=True)
            room = None if language.limit is None else language.limit - len(language.encode(prompt))
            if part.ended == "length" and room is not None and len(part.ids) == room < arguments.maximum:
                notice(f"stopped at the last of the model's {language.limit} positions; --slide continues beyond it")
        unknown = language.encode(prompt).count(language.tokenizer.unk)
        if unknown:
            notice(f"{unknown:,} tokens of the prompt are not in the vocabulary, and are read as the unknown token")


def prompt(arguments: argparse.Namespace) -> None:
    """regard prompt"""
    from regard.tasks.language import LanguageModel, fewshot

    try:
        shots = [int(part) for part in arguments.shots.split(",")]
    except ValueError as error:
        raise ValueError(f"--shots must be numbers of examples, such as 0,1,5, got {arguments.shots!r}") from error
    loaded = fewshot.load(arguments.task)
    language = LanguageModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    if arguments.show:
        most = max(shots)
        if not 0 <= most <= len(loaded.examples):
            raise ValueError(f"{most} shots need as many examples; the task has {len(loaded.examples)}")
        print(fewshot.prompt(loaded.task, loaded.examples[:most], loaded.queries[0]))
        return
    found = fewshot.run(language, loaded, shots, draws=arguments.draws, seed=arguments.seed)
    if arguments.json:
        facts = {"queries": len(loaded.queries), "majority": loaded.majority}
        print(json.dumps({**facts, "results": fewshot.report(found)}))
        return
    print(
        f"{len(loaded.queries)} queries, by {loaded.task.score}; always the most frequent answer: {loaded.majority:.2%}"
    )
    print("shots  accuracy  spread over draws")
    for part in found:
        drawn = f"{100 * part.spread:6.2f}  of {len(part.draws)}" if len(part.draws) > 1 else "     -"
        print(f"{part.shots:>5}  {100 * part.mean:7.2f}%  {drawn}")


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_text()
    flags.add_argument("--length", type=int, help="tokens per row (default: as in training)")
    flags.add_argument("--stride", type=int, help="overlap rows, and count only the last STRIDE tokens of each")


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: loss, perplexity, bits"""
    from regard.tasks.language import LanguageModel

    language = LanguageModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    what, documents = evaluated_documents(arguments)
    found = language.measure(documents, length=arguments.length, stride=arguments.stride)
    if arguments.json:
        print(json.dumps({"documents": len(documents), **found._asdict()}))
        return
    print(f"{counted(documents, 'document')}, {found.characters:,} characters, {found.tokens:,} tokens: {what}")
    print(f"loss = {found.loss:.4f} per token, perplexity = {found.perplexity:.2f}")
    print(f"bits per character = {found.bits_per_character:.4f}, bits per byte = {found.bits_per_byte:.4f}")
    print(f"word perplexity = {found.word_perplexity:.2f} over {found.words:,} words and line ends")
    if found.unknown:
        notice(f"{found.unknown:,} tokens are not in the vocabulary, and are counted as the unknown token")

"""The verbs of language models: generate, prompt, and their part of evaluate."""

import argparse
import json

from regard.tasks.command import AddVerb, EvaluationFlags, add_model, counted, evaluated_documents, notice, write_out

# for `regard train --help`, which imports no PyTorch
ABOUT = "A language model from running text: a decoder with any attention, which continues a text."
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
        "continue a text; the prompt is an argument or standard input",
        [
            'regard generate runs/language "Once upon a time" --maximum 200 --temperature 0.8 --top-k 40',
            'regard generate runs/language "ROMEO:" --n 3 --seed 7 --min-p 0.05 --stop "JULIET:"',
            "regard generate runs/language < story.txt",
            "regard generate runs/language --lines --json < prompts.txt > texts.jsonl",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue (default: standard input)")
    add_model(added)
    added.add_argument("--maximum", type=int, default=256, help="most tokens (default: 256)")
    added.add_argument("--temperature", type=float, default=0.8, help="of the draws; 0: the best token (default: 0.8)")
    added.add_argument("--top-k", type=int, help="draw among the k most probable tokens")
    added.add_argument("--top-p", type=float, help="draw among the fewest tokens with this much probability")
    added.add_argument("--min-p", type=float, help="draw among tokens with this share of the best one's probability")
    added.add_argument(
        "--repetition", type=float, default=1.0, help="above 1: tokens that came before are less likely (default: 1)"
    )
    added.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )
    added.add_argument("--n", type=int, default=1, help="number of texts (default: 1)")
    added.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    added.add_argument(
        "--slide", action="store_true", help="where the positions end, continue from the last half of the text"
    )
    added.add_argument("--lines", action="store_true", help="every line of standard input is a prompt")
    added.add_argument("--json", action="store_true", help="one JSON object a text")


def _add_prompt(verb: AddVerb) -> None:
    added = verb(
        "prompt",
        prompt,
        "how often a language model answers right, with a number of solved examples before each question",
        [
            "regard prompt runs/language --task task.yaml --shots 0,1,5 --draws 10",
            "regard prompt runs/language --task task.yaml --shots 2 --show",
        ],
    )
    added.add_argument("run", metavar="RUN", help="a run folder")
    added.add_argument("--task", required=True, help="a YAML file: prompt, answer, choices, examples, queries")
    added.add_argument("--shots", default="0", help="numbers of examples, such as 0,1,5 (default: 0)")
    added.add_argument("--draws", type=int, default=5, help="choices of examples for each number (default: 5)")
    added.add_argument("--seed", type=int, default=0, help="of the choices (default: 0)")
    added.add_argument("--show", action="store_true", help="print the prompt of the first query instead")
    added.add_argument("--json", action="store_true", help="one JSON object")
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
        raise ValueError(f"--temperature must be at least 0, which takes the best token, got {arguments.temperature}")
    greedy = arguments.temperature == 0
    if greedy and arguments.n > 1:
        raise ValueError("--temperature 0 always gives the same text: leave --n out")
    cuts = {name: getattr(arguments, name) for name in ("top_k", "top_p", "min_p")}
    if greedy and any(value is not None for value in cuts.values()):
        raise ValueError("--top-k, --top-p and --min-p cut draws: give a --temperature above 0")
    drawn = {"beam": 1} if greedy else {"sample": True, "temperature": arguments.temperature, **cuts}
    decoding = DecodingConfig(
        nbest=arguments.n,
        minimum=0,
        maximum=arguments.maximum,
        repetition=arguments.repetition,
        seed=arguments.seed,
        **drawn,
    )
    if arguments.prompt is not None:
        prompts = [arguments.prompt]
    else:
        with opened("-") as stream:
            lines = list(read_sentences(stream, name=shown("-"), longest=1 << 31))
        prompts = lines if arguments.lines else ["\n".join(lines)]
    # one text to one reader comes word by word
    live = arguments.n == 1 and not arguments.json and len(prompts) == 1
    for number, prompt in enumerate(prompts):
        before = [prompt]  # written with the first piece of text: a prompt that is refused is not

        def say(sample: int, text: str, before: list[str] = before) -> None:
            write_out("".join(before) + text)
            before.clear()

        found = language.generate(
            prompt,
            decoding,
            stop=arguments.stop or (),
            slide=arguments.slide,
            say=say if live else None,
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
                notice(f"stopped at the last of the model's {language.limit} positions; --slide continues")
        unknown = language.encode(prompt).count(language.tokenizer.unk)
        if unknown:
            notice(f"{unknown:,} tokens of the prompt are unknown to the model, and read as one kind of token")


def prompt(arguments: argparse.Namespace) -> None:
    """regard prompt"""
    from regard.tasks.language import LanguageModel, fewshot

    try:
        shots = [int(part) for part in arguments.shots.split(",")]
    except ValueError as error:
        raise ValueError(f"--shots are numbers of examples, such as 0,1,5, got {arguments.shots!r}") from error
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
        print(json.dumps({"queries": len(loaded.queries), "results": fewshot.report(found)}))
        return
    print(f"{len(loaded.queries)} queries, by {loaded.task.score}\nshots  accuracy  spread over draws")
    for part in found:
        drawn = f"{100 * part.spread:6.2f}  of {len(part.draws)}" if len(part.draws) > 1 else "     -"
        print(f"{part.shots:>5}  {100 * part.mean:7.2f}%  {drawn}")


def add_evaluation(flags: EvaluationFlags) -> None:
    flags.add_text()
    flags.add_argument("--stride", type=int, help="blocks overlap, and the last STRIDE tokens of each count")


def evaluate(arguments: argparse.Namespace) -> None:
    """regard evaluate: loss, perplexity, bits"""
    from regard.tasks.language import LanguageModel

    language = LanguageModel.load(arguments.run, which=arguments.checkpoint, device=arguments.device)
    what, documents = evaluated_documents(arguments)
    found = language.measure(documents, stride=arguments.stride)
    if arguments.json:
        print(json.dumps({"documents": len(documents), **found._asdict()}))
        return
    print(f"{counted(documents, 'document')}, {found.characters:,} characters, {found.tokens:,} tokens: {what}")
    print(f"loss = {found.loss:.4f} a token, perplexity = {found.perplexity:.2f}")
    print(f"bits per character = {found.bits_per_character:.4f}, bits per byte = {found.bits_per_byte:.4f}")
    print(f"word perplexity = {found.word_perplexity:.2f} over {found.words:,} words and line ends")
    if found.unknown:
        notice(f"{found.unknown:,} tokens are unknown to the model, and counted as one kind of token")

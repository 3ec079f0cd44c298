"""WikiText-2 by words: the perplexity of a small GPT with each attention, at equal parameters and tokens.

    python bench/wikitext.py --data FOLDER --out runs/wikitext --jobs 12

FOLDER holds train.txt, valid.txt and test.txt (plain, .gz or .xz). Every row is trained by recipe wikitext, one
word changed, and scored on the test text by the checkpoint that was best on the validation text, read in blocks of 256
tokens. Words are what spaces separate, and the end of each line, as in all published figures.
"""

import side

CONFIG = "wikitext"
SPECS = (
    "softmax",
    "local(window=32)",
    "strided(stride=16)",
    "sparse(pattern='fixed', stride=16, summary=4)",
    "heads(local(window=16), strided(stride=16), globals(tokens=4), softmax)",
    "['local(window=32)', softmax]",
    "linear",
    "efficient",
    "performer",
    "rfa",
    "synthesizer(longest=256)",
    "image(block=32, memory=32)",
)
ROWS = {spec: ["--model.attention", spec] for spec in SPECS}


def main() -> None:
    parser = side.arguments(__doc__, ROWS)
    parser.add_argument("--speed", action="store_true", help="measure the training speed too")
    given = parser.parse_args()
    rows = {name: ROWS[name] for name in given.only or ROWS}
    common = ["--config", CONFIG, "--data.text", side.file(given.data, "train.txt")]
    common += ["--data.valid", side.file(given.data, "valid.txt")]
    side.train("language", rows, common, given.out, given.jobs, given.minutes)
    print("| attention | test perplexity | validation | parameters | tokens |\n|---|---|---|---|---|")
    text = ["--text", side.file(given.data, "test.txt")]
    found = side.evaluate(list(rows), given.out, text)
    for name, test in sorted(found.items(), key=lambda item: item[1].get("word_perplexity", 1e9)):
        if "error" in test:
            print(f"| {name} | {test['error']} | | | |")
            continue
        run, log = side.facts(given.out, name), side.records(given.out, name)
        valid = min(part["word_perplexity"] for part in log if part["event"] == "evaluation")
        tokens = run["steps"] * 8192 / 1e6
        print(
            f"| {name} | {test['word_perplexity']:.1f} | {valid:.1f} | {run['parameters'] / 1e6:.2f}M | {tokens:.1f}M |"
        )
    if given.speed:
        print("\n| attention | tokens/s |\n|---|---|")
        for name, tokens in side.speed("language", rows, common, given.out).items():
            print(f"| {name} | {tokens:,} |", flush=True)


if __name__ == "__main__":
    main()

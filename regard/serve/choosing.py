"""The next token of each row of a batch, where every row has settings of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.data.tokenizer import Tokenizer
from regard.decoding.greedy import best, draw
from regard.serve.requests import Row, Scored


class Chooser:
    """Chooses tokens as `regard generate` does. Rows with the same settings are drawn together."""

    def __init__(self, tokenizer: Tokenizer, device: torch.device):
        self.tokenizer = tokenizer
        special = {tokenizer.pad, tokenizer.unk, tokenizer.bos} - {tokenizer.eos, None}
        self.blocked = torch.tensor([*sorted(special), tokenizer.eos], dtype=torch.long, device=device)

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[tuple[int, float, Scored | None]]:
        """For logits [rows, V]: a token of each row, its log probability (NaN where the logits are no numbers), and
        what is told of it where the request asks for log probabilities."""
        groups: dict[tuple, list[int]] = {}
        for place, row in enumerate(rows):
            config = row.generation.config
            key = (config.sample, config.temperature, config.top_k, config.top_p, config.min_p)
            groups.setdefault((*key, row.steps < config.minimum), []).append(place)
        tokens, values = [0] * len(rows), [0.0] * len(rows)
        for (samples, *_, bars_end), places in groups.items():
            part = logits if len(groups) == 1 else logits[torch.tensor(places, device=logits.device)]
            blocked = self.blocked if bars_end else self.blocked[:-1]
            if samples:
                uniform = torch.tensor([rows[place].draws[rows[place].steps] for place in places], device=logits.device)
                value, token = draw(part, blocked, uniform, rows[places[0]].generation.config)
            else:
                value, token = best(part, blocked)
            # one look at the device; a float64 holds any id
            for place, one, chance in zip(places, *torch.stack([token.double(), value.double()]).tolist(), strict=True):
                tokens[place], values[place] = int(one), chance
        told = self._told(rows, logits, tokens, values)
        return list(zip(tokens, values, told, strict=True))

    def score_prompt(self, ids: Sequence[int], first: int, logits: Tensor, top: int) -> list[Scored]:
        """The tokens that follow the tokens from `first` on, by logits [n, V] at them; their texts come later."""
        chances = logits.float().log_softmax(1)
        best_values, best_ids = chances.topk(min(top, chances.shape[1])) if top else (chances[:, :0], None)
        found = []
        for place, token in enumerate(ids[first + 1 : first + 1 + len(chances)]):
            others = [] if best_ids is None else zip(best_ids[place].tolist(), best_values[place].tolist(), strict=True)
            before = ids[max(0, first + place - 3) : first + place + 1]
            named = [(token_text(self.tokenizer, id, before), value) for id, value in others]
            found.append(
                Scored(token, token_text(self.tokenizer, token, before), float(chances[place, token]), named, 0)
            )
        return found

    def _told(
        self, rows: Sequence[Row], logits: Tensor, tokens: Sequence[int], values: Sequence[float]
    ) -> list[Scored | None]:
        asked = [place for place, row in enumerate(rows) if row.generation.top is not None]
        found: list[Scored | None] = [None] * len(rows)
        if not asked:
            return found
        most = max(row.generation.top or 0 for row in rows)
        chances = logits[torch.tensor(asked, device=logits.device)].float().log_softmax(1)
        best_values, best_ids = (part.tolist() for part in chances.topk(min(max(most, 1), chances.shape[1])))
        for place, some_values, some_ids in zip(asked, best_values, best_ids, strict=True):
            row = rows[place]
            top, before = row.generation.top or 0, [*row.generation.ids[-4:], *row.listener.ids][-4:]
            pairs = zip(some_ids[:top], some_values[:top], strict=True)
            named = [(token_text(self.tokenizer, id, before), value) for id, value in pairs]
            found[place] = Scored(tokens[place], "", values[place], named, 0)
        return found


def token_text(tokenizer: Tokenizer, id: int, before: Sequence[int]) -> str:
    """The text that a token adds to those before it. One that holds a part of a character is named by its bytes, a
    token of no text by its name."""
    known = tokenizer.decode(before)
    text = tokenizer.decode([*before, id])[len(known) :]
    if not text or "\ufffd" in text:
        return f"token:{tokenizer.tokens([id])[0]}"
    return text

"""Published models of each family, random and small: ours give their numbers, and they give ours."""

import pytest
import torch
import transformers
from published import PUBLISHED, compare, ours, published

from regard.interop import huggingface

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_there_and_back(name, tmp_path):
    """Imported: their numbers. Exported again: they load it without a word, and still give the same numbers."""
    model = published(name)
    model.save_pretrained(tmp_path / "theirs")
    found = huggingface.read(tmp_path / "theirs")
    own = ours(found)
    compare(model, own)
    special = {name: found.values.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    family = huggingface.write(
        tmp_path / "back", own.config, own.state_dict(), special=special, family=found.family.name
    )
    assert family.name == model.config.model_type
    model_class = type(model)
    if name == "bert, pretraining":
        model_class = transformers.BertForMaskedLM
    again, info = model_class.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {key for key in info["unexpected_keys"] if "pooler" not in key} == set()
    compare(again.eval(), own)

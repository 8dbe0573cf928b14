from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, precision_recall_fscore_support
from tests.tolerance import relative
from tests.train.small import tiny
from tests.train.test_tokens import texts

from mezzo import prepare
from mezzo.train.dist_context import one_rank
from mezzo.train.evaluate import Encoded, evaluate, report
from mezzo.train.model import build_model, encode, train_tokenizer

CPU = torch.device("cpu")
ALONE = one_rank(CPU)


def rows_and_model() -> tuple[Encoded, torch.nn.Module]:
    tokenizer = train_tokenizer(texts(), 300, 24)
    labels = torch.randint(0, 3, (len(texts()),)).tolist()
    rows = Encoded(tokens=encode(tokenizer, texts(), 24), labels=labels, pad_id=tokenizer.pad_token_id, max_length=24)
    return rows, build_model(tiny(Path("x.tsv"), Path("out"), dropout=0.5), ("a", "b", "c"), tokenizer)


@pytest.mark.parametrize("batch_size", [7, 32])
def test_batches_padding_and_order_do_not_matter(batch_size: int) -> None:
    rows, model = rows_and_model()
    model.double().eval()
    with torch.no_grad():
        one_by_one = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in rows.tokens])
    model.float().train()
    found = evaluate(model, rows, batch_size=batch_size, world=ALONE)
    margin = one_by_one.sort(-1).values.diff()[:, -1]
    terms = 32 * 24 * 8  # width, tokens, layers: more than any sum in this model has
    decided = margin > relative(torch.float32, terms) * one_by_one.abs().max()
    agrees = torch.tensor(found.predicted) == one_by_one.argmax(-1)
    assert int(decided.sum()) > len(texts()) * 0.9
    assert bool(agrees[decided].all())
    wanted = float(F.cross_entropy(one_by_one, torch.tensor(rows.labels)))
    assert found.loss == pytest.approx(wanted, rel=relative(torch.float32, terms))
    assert found.accuracy == accuracy_score(rows.labels, found.predicted)


def test_evaluating_leaves_no_trace() -> None:
    rows, model = rows_and_model()
    model.train()
    before = torch.get_rng_state()
    first = evaluate(model, rows, batch_size=16, world=ALONE)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    assert evaluate(model, rows, batch_size=16, world=ALONE) == first  # no dropout


def test_a_prepared_model_is_evaluated_under_its_policy() -> None:
    rows, model = rows_and_model()
    seen = []
    model.bert.pooler.dense.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    evaluate(prepare(model, policy="bf16").model, rows, batch_size=400, world=ALONE)
    assert seen == [torch.bfloat16]


def test_the_report_is_that_of_sklearn_with_names_for_classes() -> None:
    truth, predicted = [0, 1, 2, 1, 0, 1], [0, 1, 1, 1, 2, 0]
    data, table = report(truth, predicted, ("bad", "good", "mixed", "never"))
    precision, recall, score, support = precision_recall_fscore_support(
        truth, predicted, labels=[0, 1, 2, 3], zero_division=0.0
    )
    for place, label in enumerate(("bad", "good", "mixed", "never")):
        assert data[label] == {
            "precision": precision[place], "recall": recall[place], "f1-score": score[place], "support": support[place],
        }  # fmt: skip
        assert label in table

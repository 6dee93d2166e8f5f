"""How many wrong classes `--check-data FILE.csv --init WEIGHTS` finds: 5 % of the images get another class at random.

    python -m benchmarks.doubtful_classes runs/tiny digits
    python -m benchmarks.doubtful_classes best_vit.pth parquet:cifar10 --held-out test --given image_size=32

Prints for three draws the images with a wrong class, the share of them that is found, the findings, the share of these that
are right, and the same of only as many first findings as there are wrong classes.
"""

import argparse

import numpy as np

from parity.checkpoints.config_overrides import parse_overrides
from parity.checkpoints.surgery import drop_head
from parity.commands.printing import make_table
from parity.terminal import print_lines
from train.data.batches import DataLoader
from train.data.sources import open_dataset
from train.inference.doubtful_classes import find_doubtful
from train.inference.model import load_predictor, load_trained_model, predict_all

SHARE, DRAWS = 0.05, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="what --init takes")
    parser.add_argument("data", help="what --data takes")
    parser.add_argument("--held-out", default=None, help="a split to use alone")
    parser.add_argument("--given", nargs="*", default=[], help="fields of the config, as for --init-set")
    args = parser.parse_args()
    source = open_dataset(args.data, args.held_out)
    model = load_trained_model(args.weights, given=parse_overrides(args.given))
    predictor = load_predictor(drop_head(model.checkpoint)[0], None)
    features, classes = [], []
    for examples in (source.held_out,) if args.held_out else (source.train, source.held_out):
        targets = examples.targets.astype(np.int32)
        loader = DataLoader(examples, targets, model.input_config, 64, preprocessing=model.preprocessing)
        features.append(predict_all(loader, lambda batch: predictor.predict(batch.images)))
        classes.append(targets)
    x, true, count = np.concatenate(features), np.concatenate(classes), len(source.classes)
    table = make_table(None, "draw", "images", "wrong", "found", "findings", "right", "right of the first")
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        is_wrong = np.zeros(len(true), bool)
        is_wrong[rng.permutation(len(true))[: round(SHARE * len(true))]] = True
        given = np.where(is_wrong, (true + rng.integers(1, count, len(true))) % count, true)
        rows = [each.row for each in find_doubtful(x, given)[0]]
        wrong, found = int(is_wrong.sum()), int(is_wrong[rows].sum())
        shares = (found / wrong, found / len(rows), is_wrong[rows[:wrong]].mean())
        of_wrong, of_found, of_first = (f"{share:.0%}" for share in shares)
        table.add_row(str(draw), f"{len(true):,}", str(wrong), of_wrong, str(len(rows)), of_found, of_first)
    print_lines(table)


if __name__ == "__main__":
    main()

"""Runs in each of two ranks that torchrun starts: a Trainer of transformers with the callback.

torchrun --nproc-per-node 2 trainer_driver.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch

import afterdrop as ad

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "integrations")]

OPTIONS = {"num_samples": 4, "grid": ad.Grid((0, 1), (0, 1))}


def main(folder: Path) -> None:
    from hugging_tasks import sequences
    from transformers import Trainer, TrainingArguments

    import afterdrop.integrations.transformers as hugging

    torch.set_num_threads(1)
    model, data, collator = sequences()
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=3,
        num_train_epochs=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model, arguments, data_collator=collator, train_dataset=data, eval_dataset=data
    )
    callback = hugging.add_callback(trainer, **OPTIONS)
    trainer.train()
    callback.scores.save(folder / f"{os.environ['RANK']}.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))

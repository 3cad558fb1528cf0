"""Hugging Face Trainer on a tiny GPT-2 with random weights; no download."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    """64 random sequences."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main():
    """Train for ten steps, and save the model in `out`."""
    config = GPT2Config(
        vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    options = TrainingArguments(
        "out", max_steps=10, logging_steps=5, per_device_train_batch_size=4, report_to=[]
    )
    trainer = Trainer(GPT2LMHeadModel(config), options, train_dataset=Tokens())
    ended = trainer.train()
    print(
        f"rank {options.process_index} of {options.world_size}: step {ended.global_step}, {ended.training_loss:.3f}"
    )
    trainer.save_model()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small network on handwritten digits: `python FILE`, or `torchrun --nproc_per_node 2 FILE`."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import engine


def main() -> None:
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group()

    images, digits = load_digits(return_X_y=True)
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits)
    sampler = DistributedSampler(TensorDataset(inputs[:1500], labels[:1500]), world_size, rank, seed=0)
    loader = DataLoader(sampler.dataset, batch_size=64 // world_size, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)
    ).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model, optimizer, _, _ = engine.initialize(model=model, optimizer=optimizer, config="config.json")

    for epoch in range(8):
        sampler.set_epoch(epoch)
        model.train()
        for inputs_batch, labels_batch in loader:
            outputs = model(inputs_batch.to(device))
            loss = criterion(outputs, labels_batch.to(device))
            model.backward(loss)
            model.step()
        model.eval()
        with torch.no_grad():
            correct = model(inputs[1500:].to(device)).argmax(dim=1).cpu() == labels[1500:]
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy on held-out digits {correct.float().mean():.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One contestant of cpu.py in a process of its own: prints one JSON object per line and takes `run N` or the end of input.

    cpu_worker.py prepare MODEL PRECISION RECOMPUTE FOLDER  compiles the plan and writes the batch to FOLDER
    cpu_worker.py frit FOLDER THREADS                       trains the plan; torch is never imported
    cpu_worker.py eager|compile MODEL PRECISION THREADS     PyTorch
"""

import json
import os
import sys
import time


def say(**fields):
    print(json.dumps(fields), flush=True)


def peak_bytes():
    """The most memory that this process had resident."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def serve(step):
    """Runs a step that returns its loss, whenever asked, and says what each took."""
    say(loss=step())
    for line in sys.stdin:
        for _ in range(int(line.split()[1])):
            wall, cpu = time.perf_counter(), time.process_time()
            loss = step()
            say(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, loss=loss)
    say(peak=peak_bytes())


def prepare(name, precision, recompute, folder):
    import cpu_models
    import numpy

    import frit

    model = cpu_models.make(name)
    optimizer = {"kind": "adamw", "lr": 1e-4, "weight_decay": 0.01, "clip_grad_norm": 1.0}
    start = time.perf_counter()
    frit.compile(model.module, model.inputs, loss=model.loss, precision=precision, optimizer=optimizer, memory={"recompute": recompute}, output=f"{folder}/plan")
    numpy.savez(f"{folder}/batch.npz", *[x.numpy() for x in (*model.inputs.values(), model.labels)])
    say(parameters=sum(p.numel() for p in model.module.parameters()), seconds=time.perf_counter() - start)


def train_frit(folder, threads):
    import numpy

    import frit

    start = time.perf_counter()
    batch = list(numpy.load(f"{folder}/batch.npz").values())
    trainer = frit.load(f"{folder}/plan").trainer(threads=int(threads))
    say(ready=time.perf_counter() - start)
    serve(lambda: trainer.step(batch)["loss"])


def train_torch(mode, name, precision, threads):
    os.environ["OMP_NUM_THREADS"] = threads
    import cpu_models
    import torch

    torch.set_num_threads(int(threads))
    start = time.perf_counter()
    model = cpu_models.make(name)
    module, inputs = model.module, model.inputs
    if model.images:
        module = module.to(memory_format=torch.channels_last)
        inputs = {k: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for k, x in inputs.items()}

    def loss_of():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            output = model.output(module(**inputs))
        return model.loss_of(output, model.labels)

    loss_of = torch.compile(loss_of) if mode == "compile" else loss_of
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return float(loss.detach())

    say(ready=time.perf_counter() - start, torch=torch.__version__)
    serve(step)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    {"prepare": prepare, "frit": train_frit}.get(role, lambda *a: train_torch(role, *a))(*arguments)

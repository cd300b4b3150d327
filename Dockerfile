# An image for docs/cluster.md: docker build -t nanotitan .
# requirements.txt pins torch, whose CUDA build brings CUDA's libraries along. So the machine needs no more than NVIDIA's
# driver and its container toolkit: docker run --gpus all --shm-size 16g -v /shared:/shared nanotitan torchrun ...
FROM python:3.12-slim-bookworm

# --compile needs a C compiler; git names the commit in checkpoints and in ablate.py's reports
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /nanotitan

# before the code, so that a changed line does not install torch again
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt

COPY . .
# the folder belongs to root, and git refuses folders of others
RUN git config --system --add safe.directory /nanotitan

# torchrun would set it, with a warning; output is not kept back in a pod's log
ENV OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
CMD ["python", "train_llama3.py", "--help"]

// SPDX-License-Identifier: Apache-2.0
// Compiled code with scratch memory of every kind, for tests of the audit. Per-operator headers: they compile in seconds.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

// n floats of scratch, the first m written and then read by the same call; returns a fresh tensor.
at::Tensor scratch(const at::Tensor& x, int64_t n, int64_t m) {
  at::Tensor buffer = at::empty({n}, x.options().dtype(at::kFloat));
  float* p = buffer.data_ptr<float>();
  for (int64_t i = 0; i < m; i++) p[i] = static_cast<float>(i + 1);
  float sum = 0;
  for (int64_t i = 0; i < m; i++) sum += p[i];
  at::Tensor out = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++) out.data_ptr<float>()[i] = x.data_ptr<float>()[i] + sum;
  return out;
}

// Two accumulators as a split-KV decode takes them: read only when something is split.
at::Tensor decode(const at::Tensor& q, int64_t parts) {
  at::Tensor out_accum = at::empty({q.numel() + parts, 512}, q.options());
  at::Tensor lse_accum = at::empty({q.numel() + parts}, q.options());
  at::Tensor out = at::empty_like(q);
  if (parts == 1) {
    for (int64_t i = 0; i < q.numel(); i++) out.data_ptr<float>()[i] = 2 * q.data_ptr<float>()[i];
  } else {
    for (int64_t i = 0; i < out_accum.numel(); i++) out_accum.data_ptr<float>()[i] = 1;
    for (int64_t i = 0; i < lse_accum.numel(); i++) lse_accum.data_ptr<float>()[i] = 1;
    for (int64_t i = 0; i < q.numel(); i++)
      out.data_ptr<float>()[i] = q.data_ptr<float>()[i] + out_accum.data_ptr<float>()[i] * lse_accum.data_ptr<float>()[i];
  }
  return out;
}

// Scratch that a nested operator of PyTorch fills, and nobody reads.
at::Tensor wasteful(const at::Tensor& x, int64_t n) {
  at::Tensor zeros = at::zeros({n}, x.options());
  return x.clone();
}

// Scratch past the dispatcher: out of sight on the CPU.
at::Tensor hidden(const at::Tensor& x, int64_t n) {
  at::Tensor buffer = at::detail::empty_cpu({n}, x.options());
  return x.clone();
}

// Functions PyTorch's dispatcher knows nothing of.
void poke(at::Tensor& x, double value) {
  for (int64_t i = 0; i < x.numel(); i++) x.data_ptr<float>()[i] = static_cast<float>(value);
}
double peek(const at::Tensor& x) { return x.data_ptr<float>()[0]; }

TORCH_LIBRARY(audit_probe, m) {
  m.def("scratch(Tensor x, int n, int m) -> Tensor");
  m.def("decode(Tensor q, int parts) -> Tensor");
  m.def("wasteful(Tensor x, int n) -> Tensor", wasteful);  // composite: one kernel for every backend
  m.def("hidden(Tensor x, int n) -> Tensor");
}
TORCH_LIBRARY_IMPL(audit_probe, CPU, m) {
  m.impl("scratch", scratch);
  m.impl("decode", decode);
  m.impl("hidden", hidden);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scratch", &scratch);
  m.def("poke", &poke);
  m.def("peek", &peek);
}

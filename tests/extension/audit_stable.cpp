// SPDX-License-Identifier: Apache-2.0
// The same over PyTorch's stable ABI, which current attention wheels are built on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor scratch(const Tensor& x, int64_t n, int64_t m) {
  Tensor buffer = torch::stable::new_empty(x, {n});
  float* p = static_cast<float*>(buffer.data_ptr());
  for (int64_t i = 0; i < m; i++) p[i] = static_cast<float>(i + 1);
  float sum = 0;
  for (int64_t i = 0; i < m; i++) sum += p[i];
  Tensor out = torch::stable::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++)
    static_cast<float*>(out.data_ptr())[i] = static_cast<float*>(x.data_ptr())[i] + sum;
  return out;
}

STABLE_TORCH_LIBRARY(audit_stable, m) { m.def("scratch(Tensor x, int n, int m) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(audit_stable, CPU, m) { m.impl("scratch", TORCH_BOX(&scratch)); }

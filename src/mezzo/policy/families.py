"""The facts behind the op tables: which rule torch gives an op on each device, which one mezzo gives it, and why.

Ops with the same rules and the same reason stand in one family. Names are those of ATen; `table` adds the public
spellings. Source of torch's columns: aten/src/ATen/autocast_mode.{h,cpp} of torch 2.11 to 2.15, checked against the
dispatcher of the installed torch by `tests/policy/test_table.py`. At the end: which modules' weights feed low ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .kinds import Rule

LOW, FP32, LOW_OUT = Rule.LOW, Rule.FP32, Rule.FP32_LOW_OUT
PROMOTE, AS_IS, FORBID = Rule.PROMOTE, Rule.AS_IS, Rule.FORBID
ALL = ("cuda", "xpu", "cpu", "mps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Ops that share their rules.

    Attributes:
        ops: ATen names, without overload.
        torch: (rule, devices) pairs: what torch does where; a device that is not named has no rule.
        mezzo: the rule of the repaired table, None where the op is left out of it.
        reason: why the ops have the rule.
        repair: why mezzo's rule is another than torch's on CUDA; empty where it is the same.
        by_dtype: torch sets the op's own `dtype` argument instead of casting its input (CUDA, XPU).
        instead: what to write instead of a forbidden op.
    """

    ops: tuple[str, ...]
    torch: tuple[tuple[Rule, tuple[str, ...]], ...] = ()
    mezzo: Rule | None
    reason: str
    repair: str = ""
    by_dtype: bool = False
    instead: str | None = None


def _family(ops: str, *torch: tuple[Rule, tuple[str, ...]], **facts: Any) -> Family:
    return Family(ops=tuple(ops.split()), torch=torch, **facts)


GPU = ("cuda", "xpu")
NOT_CPU = ("cuda", "xpu", "mps")

FAMILIES: tuple[Family, ...] = (
    _family(
        "matmul mm bmm addmm addbmm baddbmm linear", (LOW, ALL), mezzo=LOW,
        reason="matrix product: 16-bit units, products summed in fp32 inside the kernel",
    ),
    _family(
        "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d", (LOW, ALL), mezzo=LOW,
        reason="convolution: 16-bit units, products summed in fp32 inside the kernel",
    ),
    _family("convolution", (LOW, NOT_CPU), mezzo=LOW, reason="convolution under its full name"),
    _family("cudnn_convolution cudnn_convolution_transpose", (LOW, ("cuda",)), mezzo=LOW, reason="convolution, cuDNN's entry"),
    _family("_mps_convolution", (LOW, ("mps",)), mezzo=LOW, reason="convolution, Metal's entry"),
    _family("scaled_dot_product_attention", (LOW, ALL), mezzo=LOW, reason="attention: two matrix products around a softmax that the kernel keeps in fp32"),
    _family("_scaled_dot_product_flash_attention", (LOW, GPU), mezzo=LOW, reason="attention, the flash kernel's entry"),
    _family("_native_multi_head_attention", (LOW, ("cpu",)), mezzo=LOW, reason="attention of the fused encoder layer"),
    _family("prelu", (LOW, ALL), mezzo=LOW, reason="input and weight must agree; nothing is summed"),
    _family("linalg_vecdot", (LOW, ("cuda", "xpu", "cpu")), mezzo=LOW, reason="batched dot product: a matrix product of one row"),
    _family("addmv addr mv einsum chain_matmul linalg_multi_dot", (LOW, NOT_CPU), mezzo=LOW, reason="made of matrix products"),
    _family("_addmm_activation", (LOW, ("cpu",)), mezzo=LOW, reason="matrix product with a fused activation"),
    _family("lstm_cell", (LOW, NOT_CPU), mezzo=LOW, reason="two matrix products a step; gates are bounded"),
    _family("gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell", (LOW, GPU), mezzo=LOW, reason="matrix products a step; gates are bounded"),
    _family(
        "gru lstm rnn_tanh rnn_relu", mezzo=LOW, reason="matrix products a step; gates are bounded",
        repair="torch casts what is inside, by device: on a CPU a GRU stays fp32, and an LSTM in fp16 meets a kernel that is "
        "not there, where one for 16-bit weights is",
    ),
    _family(
        "_cudnn_rnn", (LOW, ("cuda",)), mezzo=None, reason="cuDNN's recurrent layers; only builds with CUDA list it",
        repair="gru and lstm are ruled by their public names",
    ),
    _family("mkldnn_rnn_layer", (LOW, ("cpu",)), mezzo=LOW, reason="the fused LSTM layer on CPU: matrix products"),
    _family(
        "grouped_mm _grouped_mm", mezzo=LOW, reason="matrix products of a mixture of experts",
        repair="torch lists it nowhere: fp32 inputs stay fp32 and mixed inputs raise",
    ),
    _family("exp expm1 cosh sinh", (FP32, NOT_CPU), mezzo=FP32, reason="grows exponentially: fp16 overflows at x > 11"),
    _family("log log10 log1p log2 logsumexp", (FP32, NOT_CPU), mezzo=FP32, reason="steep near 0, where 16-bit inputs have flushed"),
    _family("acos asin erfinv tan", (FP32, NOT_CPU), mezzo=FP32, reason="derivative without bound inside its domain"),
    _family("reciprocal rsqrt", (FP32, NOT_CPU), mezzo=FP32, reason="a small 16-bit input gives an infinite result"),
    _family("pow", (FP32, NOT_CPU), mezzo=FP32, reason="a power leaves the fp16 range at once: 256 squared overflows"),
    _family("softplus", (FP32, NOT_CPU), mezzo=FP32, reason="exponential and logarithm"),
    _family(
        "softmax", (FP32, NOT_CPU), mezzo=LOW_OUT, by_dtype=True, reason="exponentials and their sum",
        repair="summed in fp32 by the kernel; the result lies in [0, 1], so 16 bit carries it at half the traffic",
    ),
    _family("log_softmax", (FP32, NOT_CPU), mezzo=FP32, by_dtype=True, reason="feeds the loss: small differences of large numbers"),
    _family("sum cumsum", (FP32, NOT_CPU), mezzo=FP32, by_dtype=True, reason="sums many terms: 16-bit partial sums stop moving"),
    _family("cumprod", (FP32, NOT_CPU), mezzo=FP32, by_dtype=True, reason="a product of many factors overflows or flushes"),
    _family("prod", (FP32, ALL), mezzo=FP32, by_dtype=True, reason="a product of many factors overflows or flushes"),
    _family("linalg_vector_norm linalg_matrix_norm", (FP32, NOT_CPU), mezzo=FP32, by_dtype=True, reason="sum of squares"),
    _family("norm", (FP32, GPU), mezzo=FP32, by_dtype=True, reason="sum of squares"),
    _family("frobenius_norm nuclear_norm dist pdist renorm", (FP32, NOT_CPU), mezzo=FP32, reason="sum of squares or of singular values"),
    _family("cdist", (FP32, ALL), mezzo=FP32, reason="sum of squares of differences"),
    _family("cosine_similarity", (FP32, NOT_CPU), mezzo=FP32, reason="divides by a product of norms"),
    _family(
        "layer_norm native_layer_norm group_norm", (FP32, NOT_CPU), mezzo=LOW_OUT, reason="mean and variance over many terms",
        repair="statistics in fp32; the result is normalised, so 16 bit carries it and the next product needs no cast",
    ),
    _family(
        "rms_norm", (FP32, GPU), mezzo=LOW_OUT, reason="mean of squares over many terms",
        repair="statistics in fp32; the result is normalised, so 16 bit carries it and the next product needs no cast",
    ),
    _family("batch_norm", (FP32, ("mps",)), mezzo=None, reason="Metal has no mixed kernel; elsewhere the kernel keeps fp32 statistics"),
    _family(
        "binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss "
        "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss "
        "smooth_l1_loss soft_margin_loss triplet_margin_loss", (FP32, ALL), mezzo=FP32,
        reason="loss: a sum over the batch, and the start of every gradient",
    ),
    _family(
        "cross_entropy_loss ctc_loss multilabel_margin_loss_forward", (FP32, ("cpu",)), mezzo=FP32,
        reason="loss: a sum over the batch, and the start of every gradient",
        repair="torch reaches it on CUDA through log_softmax and leaves the rest as it comes",
    ),
    _family(
        "binary_cross_entropy", (FORBID, GPU), (FP32, ("cpu",)), mezzo=FORBID,
        reason="a 16-bit sigmoid rounds to 0 or 1, whose logarithm is infinite",
        instead="binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before the sigmoid, "
                "or this loss inside autocast(enabled=False) on fp32 probabilities",
    ),
    _family(
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa", (FP32, GPU), mezzo=FP32, reason="backward adds many gradients into one pixel",
    ),
    _family(
        "addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot", (PROMOTE, NOT_CPU), mezzo=PROMOTE,
        reason="several tensors that must agree",
    ),
    _family("vdot", (PROMOTE, GPU), mezzo=PROMOTE, reason="several tensors that must agree"),
    _family("grid_sampler", (PROMOTE, NOT_CPU), (FP32, ("cpu",)), mezzo=PROMOTE, reason="input and grid must agree"),
    _family("cat stack index_copy", (PROMOTE, ("cpu",)), mezzo=PROMOTE, reason="several tensors that must agree"),
    _family(
        "index_add scatter scatter_reduce index_reduce lerp", mezzo=PROMOTE, reason="several tensors that must agree",
        repair="torch lists it nowhere and raises on mixed dtypes",
    ),
    _family(
        "mean var std var_mean std_mean", mezzo=FP32, reason="sum of many terms or of squares",
        repair="torch lists it nowhere: a hand-written norm runs in fp16 although x.pow(2) would be fp32",
    ),
    _family(
        "square pairwise_distance trapezoid cumulative_trapezoid sum_to_size", mezzo=FP32, reason="sum of many terms, or a power: 256 squared overflows fp16",
        repair="torch reaches pow, norm or sum underneath on CUDA only",
    ),
    _family("logcumsumexp", mezzo=FP32, reason="exponentials and their sum", repair="torch lists logsumexp and cumsum, not this"),
    _family(
        "cov corrcoef", mezzo=FP32, reason="differences of large sums, squared",
        repair="torch multiplies in 16 bit underneath: correlations lose their digits",
    ),
    _family(
        "linalg_matrix_power matrix_power linalg_pinv linalg_matrix_exp matrix_exp", mezzo=FP32,
        reason="rounding errors are multiplied step by step",
        repair="torch multiplies in 16 bit underneath, or raises",
    ),
    _family(
        "cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig "
        "linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq "
        "linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve "
        "_lu_with_info orgqr ormqr qr svd triangular_solve", (FP32, ("cpu",)), mezzo=FP32,
        reason="matrix decomposition: no 16-bit kernel, and rounding is amplified by the condition number",
        repair="torch raises on CUDA for 16-bit inputs",
    ),
    _family("pinverse", (FP32, ("cpu",)), mezzo=FP32, reason="matrix decomposition: no 16-bit kernel", repair="torch raises on CUDA for 16-bit inputs"),
    _family("linalg_matrix_sqrth", (FP32, ("cuda", "cpu")), mezzo=FP32, reason="matrix decomposition: no 16-bit kernel"),
    _family("trace", (FP32, ("cpu",)), mezzo=FP32, reason="sums many terms", repair="torch leaves it in 16 bit on CUDA"),
    _family(
        "fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft "
        "fft_rfft2 fft_rfftn stft", (FP32, ("cpu",)), mezzo=FP32, reason="sums over the whole signal; complex 16-bit has few kernels",
        repair="torch leaves it in 16 bit on CUDA, where only powers of two have a kernel",
    ),
    _family(
        "det linalg_det logdet slogdet linalg_slogdet linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_solve_ex "
        "linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_solve_triangular linalg_vander fft_hfft2 fft_hfftn "
        "fft_ihfft2 fft_ihfftn histogram histogramdd complex linalg_norm linalg_lu_solve smm sspaddmm sparse_sampled_addmm "
        "_sparse_softmax _sparse_log_softmax binomial _standard_gamma _sample_dirichlet rrelu", mezzo=FP32, reason="no 16-bit kernel, or few",
        repair="torch raises for 16-bit inputs",
    ),
    _family(
        "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
        "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he "
        "special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 "
        "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta", mezzo=FP32,
        reason="special function: no 16-bit kernel", repair="torch raises for 16-bit inputs",
    ),
    _family(
        "quantile nanquantile", (FP32, ("cpu",)), mezzo=FP32, reason="interpolates between neighbours; no 16-bit kernel",
        repair="torch raises on CUDA for 16-bit inputs",
    ),
    _family("polar view_as_complex", (FP32, ("cpu",)), mezzo=FP32, reason="complex 16-bit has few kernels", repair="torch makes complex32 on CUDA"),
    _family(
        "adaptive_avg_pool3d avg_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_pool3d max_unpool2d "
        "max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d grid_sampler_2d "
        "grid_sampler_3d _grid_sampler_2d_cpu_fallback fake_quantize_per_tensor_affine", (FP32, ("cpu",)), mezzo=None,
        reason="torch lists it on CPU, where 16-bit kernels came late; its own kernel is safe",
    ),
)  # fmt: skip

CAST_AT_USE = frozenset({"Linear", "_ConvNd", "MultiheadAttention", "Conv1D"})
"""Modules whose weights go into low ops and nowhere else, so that it does not matter who casts them, or when. Conv1D is
transformers' Linear with its weight transposed."""
LOOKED_UP = frozenset({"Embedding", "EmbeddingBag"})
"""Modules whose weights are handed on as they are stored, and meet low ops later."""


def is_cast_at_use(class_names: Iterable[str]) -> bool:
    """Whether a low op takes a module's own weights; by the names of its class and the classes above it."""
    return not CAST_AT_USE.isdisjoint(class_names)


def is_matmul_like(class_names: Iterable[str]) -> bool:
    """Whether a module's own weights end up in low ops, so that 16-bit storage loses nothing but their masters keep."""
    return not (CAST_AT_USE | LOOKED_UP).isdisjoint(class_names)

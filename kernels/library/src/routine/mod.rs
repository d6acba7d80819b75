//! Routines by name: every CPU kernel with its parameters, as recorded in a plan.
//!
//! | module | what |
//! |---|---|
//! | [`gemm`] | batched GEMM with bias and accumulation |
//! | [`conv`] | convolution and its gradients |
//! | [`pooling`] | max and sum pooling |
//! | [`batch_norm`] | batch normalization and its gradient |
//! | [`attention`] | scaled dot-product attention, forward and backward |
//! | [`embedding`] | row gather and its gradient |
//! | [`index`] | indexed reads and writes |
//! | [`copy`] | strided copies and transposes |
//! | [`convert`] | casts between element types |
//! | [`reduce`] | sums and sums of squares |
//! | [`reduce_axes`] | reductions over any axes |
//! | [`order`] | top-k and arg-reductions |
//! | [`adafactor`] | a step of Adafactor |
//! | [`quantize`] | quantization to 8-bit floats |
//! | [`random`] | random numbers and masks from a counter-based generator |
//! | [`cum_sum`] | running sums |

pub mod adafactor;
pub mod attention;
pub mod batch_norm;
mod columns;
pub mod conv;
pub mod convert;
pub mod copy;
pub mod cum_sum;
pub mod embedding;
pub mod gemm;
pub mod index;
pub mod order;
pub mod pooling;
pub mod quantize;
pub mod random;
pub mod reduce;
pub mod reduce_axes;
pub mod reproducible;

use self::gemm::Gemm;
use crate::dtype::Elem;
use crate::pool::{Pool, Shareable};
use adafactor::Adafactor;
use attention::{Attention, BackwardInputs, BackwardOutputs, GradientStrides};
use batch_norm::{BatchNorm, Gate};
use conv::Conv;
use convert::convert;
use copy::StridedCopy;
use cum_sum::CumSum;
use embedding::Embedding;
use index::{Combine, Indexed};
use order::TopK;
use pooling::Pooling;
use quantize::{Format, quantize};
use random::{Random, RandomMask};
use reduce::{Elements, sum_squares};
use reduce_axes::ReduceAxes;
use serde::{Deserialize, Serialize};

/// A kernel with its parameters. Operands are in the order of the operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "name", content = "parameters")]
pub enum Routine {
    /// A GEMM of `a`, `b` and, if there is one, a bias, run by run; of `a`, `b` and what it is added to, if it accumulates.
    Gemm {
        /// One run.
        gemm: Gemm,
        /// Where each run begins, in matrices of `a`, `b` and the result.
        runs: Vec<[usize; 3]>,
    },
    /// A convolution.
    Conv(Conv),
    /// Its gradient for the image, or a transposed convolution.
    ConvGradInput(Conv),
    /// Its gradient for the filters.
    ConvGradWeight(Conv),
    /// The largest element of each window.
    MaxPool(Pooling),
    /// Its gradient.
    MaxPoolGrad(Pooling),
    /// The sum of each window.
    SumPool(Pooling),
    /// Its gradient.
    SumPoolGrad(Pooling),
    /// Batch normalization of `x`, by scale and bias, and of the sum with a fourth operand, if there is one.
    BatchNorm(BatchNorm),
    /// Its gradient. With a ReLU the result of that is the sixth operand, and if there is a seventh, it is added to the first; a fourth
    /// result is what passes the ReLU.
    BatchNormGrad(BatchNorm),
    /// Attention.
    Attention(Attention),
    /// Its gradient.
    AttentionGrad(Attention, GradientStrides),
    /// Rows of a table.
    Embedding(Embedding),
    /// The gradient for the table.
    EmbeddingGrad(Embedding),
    /// Strided copies from operands to results.
    Copy(Vec<Part>),
    /// A strided copy of the operand into a result filled with one element.
    Pad {
        /// The bytes of the element.
        element: Vec<u8>,
        /// The copy.
        copy: StridedCopy,
        /// The first byte of the result that it writes.
        to: usize,
    },
    /// Elements of the first operand at the places that the second names.
    Gather(Indexed),
    /// Updates written into a copy of the data, or into a result of one element: then the operands are indices and
    /// updates alone.
    Scatter {
        /// Where.
        indexed: Indexed,
        /// What an update does there.
        combine: Combine,
        /// The element type.
        elem: Elem,
        /// The bytes of the element.
        fill: Option<Vec<u8>>,
    },
    /// The first elements in sorted order and their indices.
    TopK(TopK),
    /// Their indices alone.
    ArgReduce(TopK),
    /// Random numbers for the generator's state.
    Random(Random),
    /// A random mask for it.
    RandomMask(RandomMask),
    /// Running sums.
    CumSum(CumSum),
    /// A reduction over axes.
    Reduce(ReduceAxes),
    /// A conversion between float types.
    Convert {
        /// Of the operand.
        from: Elem,
        /// Of the result.
        to: Elem,
        /// Number of elements.
        len: usize,
    },
    /// Number of non-finite elements and sum of squares of all operands, f32.
    GradStats,
    /// Number of non-finite elements and digits of the exact sum of squares of all operands, f32.
    ExactStats,
    /// Statistics with such a sum, rounded.
    RoundStats,
    /// One more operand of a sum in a binary tree, f32.
    TreeSum,
    /// Rounding to an 8-bit float, by an element of the second operand if there is one.
    Quantize {
        /// The format.
        format: Float8,
        /// The type that the numbers keep.
        elem: Elem,
        /// Number of elements.
        len: usize,
        /// The element with the largest magnitude of late.
        index: usize,
    },
    /// A part of a step of Adafactor.
    Adafactor {
        /// Which.
        part: AdafactorPart,
        /// The parameter.
        param: Adafactor,
        /// Whether the parameter has no elements.
        empty: bool,
    },
}

/// One of several strided copies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// The operand, and its first byte that is read.
    pub from: (usize, usize),
    /// The result, and its first byte that is written.
    pub to: (usize, usize),
    /// The copy.
    pub copy: StridedCopy,
}

/// An 8-bit float by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Float8 {
    /// [`Format::E4M3`].
    E4M3,
    /// [`Format::E5M2`].
    E5M2,
}

/// A part of a step of Adafactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdafactorPart {
    /// Sums of squares over this rank's elements.
    Sums,
    /// The second moments, and the sum of the update's squares.
    Moments,
    /// The step.
    Step,
}

/// A dense operand or result.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// First byte.
    pub pointer: *mut u8,
    /// Number of bytes.
    pub bytes: usize,
}

impl Routine {
    /// Runs it.
    ///
    /// # Errors
    /// An index outside of its axis.
    ///
    /// # Safety
    /// Operands and results are aligned, valid and as large as the parameters say; results overlap no operand but
    /// those of Adafactor the one they replace.
    pub unsafe fn run(
        &self,
        pool: &Pool,
        reads: &[Operand],
        writes: &[Operand],
    ) -> Result<(), String> {
        let read = |i: usize| reads[i].pointer.cast_const();
        let optional =
            |i: usize| reads.get(i).map_or(std::ptr::null(), |read| read.pointer.cast_const());
        let write = |i: usize| writes[i].pointer;
        // SAFETY: by the contract of this function.
        unsafe {
            match self {
                Routine::Gemm { gemm, runs } => gemms(gemm, runs, pool, reads, write(0)),
                Routine::Conv(conv) => conv.forward(pool, read(0), read(1), write(0)),
                Routine::ConvGradInput(conv) => conv.grad_input(pool, read(0), read(1), write(0)),
                Routine::ConvGradWeight(conv) => conv.grad_weight(pool, read(0), read(1), write(0)),
                Routine::MaxPool(pooling) => pooling.max(pool, read(0), write(0)),
                Routine::MaxPoolGrad(pooling) => {
                    pooling.max_grad(pool, read(0), read(1), write(0));
                }
                Routine::SumPool(pooling) => pooling.sum(pool, read(0), write(0)),
                Routine::SumPoolGrad(pooling) => pooling.sum_grad(pool, read(0), write(0)),
                Routine::BatchNorm(norm) => norm.forward(
                    pool,
                    [read(0), optional(3)],
                    [read(1).cast(), read(2).cast()],
                    write(0),
                    [write(1).cast(), write(2).cast()],
                ),
                Routine::BatchNormGrad(norm) => norm.backward(
                    pool,
                    [read(0), read(1)],
                    norm.relu.then(|| Gate {
                        y: read(5),
                        added: optional(6),
                        passed: writes.get(3).map_or(std::ptr::null_mut(), |w| w.pointer),
                    }),
                    [read(2).cast(), read(3).cast(), read(4).cast()],
                    write(0),
                    [write(1).cast(), write(2).cast()],
                ),
                Routine::Attention(attention) => {
                    let (q, k, v) = (read(0), read(1), read(2));
                    let masks = masks(attention, reads, 3);
                    attention.forward(pool, q, k, v, masks, write(0), write(1).cast());
                }
                Routine::AttentionGrad(attention, gradients) => {
                    attention_grad((attention, gradients), pool, reads, writes);
                }
                Routine::Embedding(embedding) => embedding
                    .forward(pool, read(0), read(1), write(0))
                    .map_err(|e| e.to_string())?,
                Routine::EmbeddingGrad(embedding) => {
                    embedding
                        .backward(pool, [read(1), read(0), optional(2)], write(0))
                        .map_err(|e| e.to_string())?;
                }
                Routine::Copy(parts) => {
                    let copies: Vec<_> = parts
                        .iter()
                        .map(|Part { from, to, copy }| {
                            (copy, read(from.0).add(from.1), write(to.0).add(to.1))
                        })
                        .collect();
                    StridedCopy::run_all(pool, &copies);
                }
                Routine::Pad { element, copy, to } => {
                    fill(pool, writes[0], element);
                    copy.run(pool, read(0), write(0).add(*to));
                }
                Routine::Gather(indexed) => {
                    indexed.gather(pool, read(0), read(1), write(0)).map_err(|e| e.to_string())?
                }
                Routine::Scatter { indexed, combine, elem, fill: element } => {
                    let first = match element {
                        Some(element) => {
                            fill(pool, writes[0], element);
                            0
                        }
                        None => {
                            std::ptr::copy_nonoverlapping(read(0), write(0), writes[0].bytes);
                            1
                        }
                    };
                    let (ids, updates) = (read(first), read(first + 1));
                    indexed
                        .scatter(updates, ids, write(0), *combine, *elem)
                        .map_err(|e| e.to_string())?;
                }
                Routine::TopK(top) => top.run(pool, read(0), write(0), write(1).cast()),
                Routine::ArgReduce(top) => {
                    top.run(pool, read(0), std::ptr::null_mut(), write(0).cast());
                }
                Routine::RandomMask(mask) => {
                    mask.run(pool, read(0).cast::<[i64; 5]>().read(), write(0));
                }
                Routine::Random(draws) => {
                    draws.run(pool, read(0).cast::<[i64; 5]>().read(), write(0).cast());
                }
                Routine::CumSum(sums) => sums.run(pool, read(0), write(0)),
                Routine::Reduce(reduce) => reduce.run(pool, read(0), write(0)),
                Routine::Convert { from, to, len } => {
                    convert(pool, read(0), *from, write(0), *to, *len);
                }
                Routine::GradStats => grad_stats(pool, reads, write(0).cast()),
                Routine::ExactStats => reproducible::exact_stats(pool, reads, write(0).cast()),
                Routine::RoundStats => reproducible::round_stats(read(0).cast(), write(0).cast()),
                Routine::TreeSum => reproducible::tree_sum(pool, reads, writes),
                Routine::Quantize { format, elem, len, index } => {
                    let recent = match reads.len() {
                        1 => 0.0,
                        _ => read(1).cast::<f32>().add(*index).read(),
                    };
                    let (x, y) = (read(0), write(0));
                    let amax = quantize(pool, x, y, (*len, *elem), format.format(), recent);
                    write(1).cast::<f32>().write(amax);
                }
                Routine::Adafactor { part, param, empty } => {
                    part.run(*param, *empty, pool, reads, writes);
                }
            }
        }
        Ok(())
    }
}

impl Float8 {
    fn format(self) -> Format {
        match self {
            Float8::E4M3 => Format::E4M3,
            Float8::E5M2 => Format::E5M2,
        }
    }
}

/// # Safety
/// As for [`Routine::run`].
unsafe fn gemms(gemm: &Gemm, runs: &[[usize; 3]], pool: &Pool, reads: &[Operand], result: *mut u8) {
    let Gemm { m, n, k, .. } = *gemm;
    let third = reads.get(2).map_or(std::ptr::null(), |third| third.pointer.cast_const());
    let bias = if gemm.accumulate { std::ptr::null() } else { third };
    if gemm.accumulate && !std::ptr::eq(third, result) {
        let bytes = gemm.batch * m * n * gemm.c.elem.size();
        // SAFETY: what is added has the size of the result, and is where it is or apart from it.
        unsafe { third.copy_to_nonoverlapping(result, bytes) };
    }
    for at in runs {
        // SAFETY: as for the caller.
        unsafe {
            let a = reads[0].pointer.add(at[0] * m * k * gemm.a.elem.size());
            let b = reads[1].pointer.add(at[1] * k * n * gemm.b.elem.size());
            gemm.run(pool, a, b, result.add(at[2] * m * n * gemm.c.elem.size()), bias);
        }
    }
}

/// The mask of an attention, which is operand `first`, and the last operand, which says what dropout keeps.
fn masks(attention: &Attention, reads: &[Operand], first: usize) -> [*const u8; 2] {
    let at = |i: usize| reads.get(i).map_or(std::ptr::null(), |read| read.pointer.cast_const());
    let mask = if attention.mask.is_some() { at(first) } else { std::ptr::null() };
    [mask, at(reads.len() - 1)]
}

/// # Safety
/// As for [`Routine::run`].
unsafe fn attention_grad(
    (attention, gradients): (&Attention, &GradientStrides),
    pool: &Pool,
    reads: &[Operand],
    writes: &[Operand],
) {
    let read = |i: usize| reads[i].pointer.cast_const();
    let [mask, kept] = masks(attention, reads, 6);
    let inputs = BackwardInputs {
        d_o: read(0),
        q: read(1),
        k: read(2),
        v: read(3),
        o: read(4),
        lse: read(5).cast(),
        mask,
        kept,
    };
    let outputs = BackwardOutputs {
        d_q: writes[0].pointer,
        d_k: writes[1].pointer,
        d_v: writes[2].pointer,
        d_mask: writes.get(3).map_or(std::ptr::null_mut(), |d| d.pointer.cast()),
    };
    // SAFETY: as for the caller.
    unsafe { attention.backward(pool, gradients, &inputs, &outputs) };
}

/// # Safety
/// As for [`Routine::run`].
unsafe fn grad_stats(pool: &Pool, reads: &[Operand], out: *mut f32) {
    let parts: Vec<Elements> = reads
        .iter()
        .map(|operand| (operand.pointer.cast_const(), operand.bytes / Elem::F32.size()))
        .collect();
    // SAFETY: as for the caller.
    unsafe {
        let sum = sum_squares(pool, &parts, Elem::F32);
        out.write(sum.n_non_finite as f32);
        out.add(1).write(sum.value as f32);
    }
}

/// Writes one element over and over.
///
/// # Safety
/// The result must be writable.
unsafe fn fill(pool: &Pool, out: Operand, element: &[u8]) {
    /// Bytes that a chunk of work writes, about.
    const CHUNK: usize = 1 << 17;
    let step = CHUNK / element.len() * element.len();
    let at = Shareable::new(out.pointer);
    pool.run(out.bytes.div_ceil(step), &|chunk| {
        let first = chunk * step;
        let len = step.min(out.bytes - first);
        // SAFETY: chunks are disjoint; the caller vouches for the range.
        let part = unsafe { std::slice::from_raw_parts_mut(at.get().add(first), len) };
        match element {
            [first, rest @ ..] if rest.iter().all(|byte| byte == first) => part.fill(*first),
            _ => part.chunks_exact_mut(element.len()).for_each(|e| e.copy_from_slice(element)),
        }
    });
}

impl AdafactorPart {
    /// Runs a part of a step.
    ///
    /// # Safety
    /// As for [`Routine::run`].
    unsafe fn run(
        self,
        kernel: Adafactor,
        empty: bool,
        pool: &Pool,
        reads: &[Operand],
        writes: &[Operand],
    ) {
        // SAFETY: by the contract of this function.
        unsafe {
            let floats = |i: usize| -> &[f32] {
                std::slice::from_raw_parts(reads[i].pointer.cast(), reads[i].bytes / 4)
            };
            let scalar = |i: usize| f64::from(reads[i].pointer.cast::<f32>().read());
            let result = |i: usize| -> &mut [f32] {
                std::slice::from_raw_parts_mut(writes[i].pointer.cast(), writes[i].bytes / 4)
            };
            // Usually the same place.
            let keep = |from: usize, to: usize| {
                let (from, to) = (reads[from], writes[to]);
                if from.pointer != to.pointer {
                    std::ptr::copy(from.pointer, to.pointer, from.bytes);
                }
            };
            let part = |factor: usize, clip_value: usize| adafactor::Part {
                begin: reads[0].pointer.cast::<i64>().read(),
                grads: floats(1),
                scale: adafactor::Scale { factor: scalar(factor), clip_value: scalar(clip_value) },
            };
            match self {
                AdafactorPart::Sums if empty => result(0).fill(0.0),
                AdafactorPart::Sums => kernel.sums(pool, part(4, 3), floats(2), result(0)),
                AdafactorPart::Moments => {
                    keep(3, 0);
                    let skipped = empty || scalar(8) != 0.0;
                    result(1)[0] = if skipped {
                        0.0
                    } else {
                        let weight = (scalar(6) + 1.0).powf(-scalar(4));
                        kernel.moments(pool, part(7, 5), floats(2), result(0), weight)
                    };
                }
                AdafactorPart::Step => {
                    keep(2, 0);
                    if !empty && scalar(13) == 0.0 {
                        let settings = adafactor::Settings {
                            of_param: scalar(4),
                            of_update: scalar(5),
                            lr: scalar(6),
                            eps: scalar(7),
                            threshold: scalar(8),
                            decay: scalar(9),
                            step: scalar(11),
                        };
                        kernel.step(pool, part(12, 10), result(0), floats(3), &settings);
                    }
                }
            }
        }
    }
}

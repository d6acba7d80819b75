//! Pads matmuls to the alignment that tensor cores need.
//!
//! In: a graph with final dtypes. Out: the same graph in which operands of some matmuls are padded with zeros and results are sliced.
//! Zero terms change no sum and zero columns are sliced off, so results are bit-identical; parameters keep their logical shapes, the
//! padding is a node. A cross-entropy reads padded logits as they are, and writes zeros to the padding of their gradient.
//!
//! The cost model decides for each matmul: the durations of its three GEMMs of a step (forward and the two gradients, which inherit the
//! sizes) against the copies for padding and slicing. For matmuls with unaligned rows, the decision is reported as lint L23. An 8-bit
//! matmul, for which all sizes must be aligned, is padded or else stays in bf16.

use crate::cost::{Cluster, Device, GemmShape};
use crate::fp8::{self, Fp8};
use crate::pass::{Changed, Numerics, Pass, PassContext, PassInfo, Property, bug};
use frit_ir::ops::{Pad, Slice};
use frit_ir::plan::Target;
use frit_ir::{DType, Diagnostic, Graph, GraphError, NodeId, Op, Severity, ValueId};
use std::collections::{BTreeMap, HashMap};

/// The contract of [`PadTensorCores`].
pub const INFO: PassInfo = PassInfo {
    name: "pad_tensor_cores",
    summary: "pad matmuls to the alignment of tensor cores",
    requires: &[Property::Autocast],
    ensures: &[],
    breaks: &[],
    numerics: Numerics::Bitwise,
};

/// Rows are padded to multiples of this many bytes: the least that the widest loads need, or whole lines.
const ALIGNMENTS: [usize; 2] = [16, 128];

/// Contractions of a step with the sizes of a matmul: itself and its two gradients.
const CONTRACTIONS: f64 = 3.0;

/// Device for predicting the gain of padding if the target has no tensor cores.
const EXAMPLE: &str = "sm_90";

frit_ir::choices! {
    /// When to pad.
    #[derive(Default)]
    PadMode {
        /// Low-precision matmuls, where the cost model predicts a gain.
        #[default]
        Auto = "auto",
        /// Every unaligned matmul.
        Always = "always",
        /// Never.
        Never = "never",
    }
}

/// Pads matmuls.
#[derive(Clone, Debug, PartialEq)]
pub struct PadTensorCores {
    /// When.
    pub mode: PadMode,
    /// Target of the plan.
    pub target: Target,
    /// As given to the pass `fp8`.
    pub fp8: Fp8,
}

impl Pass for PadTensorCores {
    fn info(&self) -> &'static PassInfo {
        &INFO
    }

    fn run(&self, graph: &mut Graph, context: &mut PassContext) -> Result<Changed, Diagnostic> {
        let mut padded = HashMap::new();
        let mut map = HashMap::new();
        let mut advice: BTreeMap<String, (Diagnostic, usize)> = BTreeMap::new();
        for id in graph.order().to_vec() {
            let node = graph.node(id);
            let Op::MatMul(op) = &node.op else { continue };
            let [a, b] = [0, 1].map(|i| graph.ty(node.inputs[i]));
            let gemm = GemmShape::of(op, a, b);
            let eighth = self.fp8.covers(node, gemm.dtype);
            let Some(choice) = self.choose(&gemm, eighth) else { continue };
            let origin = node.origin.by(INFO.name);
            if choice.taken {
                let y = node.outputs[0];
                let new = choice.growth.apply(graph, id, &mut padded).map_err(bug(INFO.name))?;
                context.remark(&origin, choice.text(&gemm));
                map.insert(y, new);
            }
            if gemm.dtype.is_low_precision() {
                let text = choice.text(&gemm);
                let entry = advice.entry(text.clone()).or_insert_with(|| {
                    let lint = Diagnostic::new("L23", Severity::Warning, text).at(&origin);
                    (Diagnostic { severity: Severity::Info, help: choice.remedy(), ..lint }, 0)
                });
                entry.1 += 1;
            }
        }
        for (lint, n) in advice.into_values() {
            context.warn(if n > 1 {
                lint.note(format!("{n} matmuls of these sizes"))
            } else {
                lint
            });
        }
        graph.substitute(&map);
        graph.remove_dead();
        crate::canonicalize::read_padded_logits(graph).map_err(bug(INFO.name))?;
        crate::canonicalize::sort(graph)?;
        graph.remove_dead();
        Ok(Changed::when(!map.is_empty()))
    }
}

/// Elements added to each size of a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Growth {
    m: usize,
    n: usize,
    k: usize,
    trans: [bool; 2],
}

/// The decision for a matmul with unaligned rows.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    growth: Growth,
    taken: bool,
    /// Seconds of a step unpadded and padded, copies included, on a device with tensor cores.
    before: f64,
    after: f64,
    /// Whether that device is the target.
    own: bool,
    /// Whether the padded matmul has 8-bit operands.
    eighth: bool,
}

impl PadTensorCores {
    /// The best padding of this matmul and whether to apply it; `None` if it is aligned. With `eighth`, padding may
    /// enable 8-bit operands.
    fn choose(&self, gemm: &GemmShape, eighth: bool) -> Option<Choice> {
        let target = Cluster::of(&self.target).device;
        let own = target.has_matrix_units();
        let device = if own {
            target
        } else {
            Cluster::of(&Target { arch: EXAMPLE.into(), ..self.target.clone() }).device
        };
        let GemmShape { m, n, k, .. } = *gemm;
        let sizes = [m, n, k];
        // A size of one uses no tensor core.
        let eighth = eighth && sizes.iter().all(|size| *size > 1);
        let narrow = GemmShape { dtype: DType::F8E4M3, ..*gemm };
        let is_narrow = eighth && sizes.iter().all(|size| size.is_multiple_of(fp8::ALIGNMENT));
        let before = CONTRACTIONS * device.matmul_seconds(if is_narrow { &narrow } else { gemm });
        let wanted = if eighth { &narrow } else { gemm };
        let best = ALIGNMENTS
            .into_iter()
            .filter_map(|alignment| Growth::to(wanted, alignment))
            .map(|growth| (growth, growth.step_seconds(gemm, wanted.dtype, &device)))
            .min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        let (growth, after) = best;
        let taken = match self.mode {
            PadMode::Never => false,
            PadMode::Always => true,
            PadMode::Auto => own && gemm.dtype.is_low_precision() && after < before,
        };
        Some(Choice { growth, taken, before, after, own, eighth })
    }
}

impl Choice {
    /// The sizes, the cost of padding and its gain.
    fn text(&self, gemm: &GemmShape) -> String {
        let GemmShape { m, n, k, dtype, .. } = *gemm;
        let Growth { m: dm, n: dn, k: dk, .. } = self.growth;
        let grown: Vec<String> = [("M", m, dm), ("N", n, dn), ("K", k, dk)]
            .into_iter()
            .filter(|(.., more)| *more > 0)
            .map(|(axis, size, more)| format!("{axis} {size} to {}", size + more))
            .collect();
        let waste = 100.0
            * (((m + dm) as f64 * (n + dn) as f64 * (k + dk) as f64)
                / (m as f64 * n as f64 * k as f64)
                - 1.0);
        let verb = if self.taken { "padded" } else { "not padded" };
        let on = if self.own { String::new() } else { format!(" on {EXAMPLE}") };
        let eighth = if self.eighth { " for 8-bit floats" } else { "" };
        format!(
            "{verb}: {dtype} matmul of {m} × {k} by {k} × {n}{eighth}, {}: {waste:.1} % more arithmetic, \
             predicted gain {:.2} times{on}",
            grown.join(", "),
            self.before / self.after,
        )
    }

    fn remedy(&self) -> Option<String> {
        let text = match (self.taken, self.own, self.after < self.before) {
            (true, ..) => return None,
            (false, true, true) => "set padding.tensor_cores = \"auto\"",
            (false, false, true) => {
                "the kernels of this target pack their operands and need no alignment; plans for \
                 GPUs pad automatically"
            }
            (false, _, false) => {
                "choose an aligned size in the model; padding this one does not pay"
            }
        };
        Some(text.into())
    }
}

impl Growth {
    /// Elements missing from rows to a multiple of this many bytes; `None` if none.
    fn to(gemm: &GemmShape, alignment: usize) -> Option<Growth> {
        let GemmShape { m, n, k, trans, .. } = *gemm;
        let multiple = (alignment / gemm.dtype.size()).max(1);
        let missing = |d: usize| d.next_multiple_of(multiple) - d;
        // Rows of `a` run along M only if it is transposed; matmuls of 8-bit floats require all sizes to be aligned. A
        // size of one uses no tensor core.
        let along_m = trans[0] || gemm.dtype.size() == 1;
        let growth = Growth {
            m: if along_m && m > 1 { missing(m) } else { 0 },
            n: if n > 1 { missing(n) } else { 0 },
            k: if k > 1 { missing(k) } else { 0 },
            trans,
        };
        let empty = gemm.flops() == 0;
        (growth.m + growth.n + growth.k > 0 && !empty).then_some(growth)
    }

    fn grown(&self, gemm: &GemmShape) -> GemmShape {
        let GemmShape { m, n, k, .. } = *gemm;
        GemmShape { m: m + self.m, n: n + self.n, k: k + self.k, ..*gemm }
    }

    /// Seconds of a step: the padded contractions of operands of `dtype`, and one copy of every tensor that
    /// grows, of operands forward and of the result's gradient backward. Cuts cost nothing: the kernel that
    /// follows reads through them.
    fn step_seconds(&self, gemm: &GemmShape, dtype: DType, device: &Device) -> f64 {
        let wide = self.grown(gemm);
        let copies = [
            (self.m + self.k > 0, gemm.m * gemm.k + wide.m * wide.k, gemm.dtype),
            (self.k + self.n > 0, gemm.k * gemm.n + wide.k * wide.n, gemm.dtype),
            (self.m + self.n > 0, gemm.m * gemm.n + wide.m * wide.n, gemm.out),
        ];
        let copies = copies.into_iter().filter(|(needed, ..)| *needed);
        let bytes = |(_, elements, dtype): (bool, usize, DType)| {
            (gemm.batch * elements * dtype.size()) as u64
        };
        CONTRACTIONS * device.matmul_seconds(&GemmShape { dtype, ..wide })
            + copies.map(|copy| device.copy_seconds(bytes(copy))).sum::<f64>()
    }

    /// The padded matmul, sliced to the shape of the original result.
    fn apply(
        &self,
        graph: &mut Graph,
        id: NodeId,
        padded: &mut HashMap<(ValueId, usize, usize), ValueId>,
    ) -> Result<ValueId, GraphError> {
        let node = graph.node(id);
        let (origin, region) = (node.origin.by(INFO.name), node.region);
        let (op, inputs, y) = (node.op.clone(), node.inputs.clone(), node.outputs[0]);
        let swap = |trans: bool, rows: usize, columns: usize| {
            if trans { (columns, rows) } else { (rows, columns) }
        };
        let borders = [swap(self.trans[0], self.m, self.k), swap(self.trans[1], self.k, self.n)];
        let mut operands = Vec::with_capacity(2);
        for (&v, (rows, columns)) in inputs.iter().zip(borders) {
            if rows + columns == 0 {
                operands.push(v);
                continue;
            }
            if let Some(&same) = padded.get(&(v, rows, columns)) {
                operands.push(same);
                continue;
            }
            let rank = graph.ty(v).shape.rank();
            let (low, mut high) = (vec![0; rank], vec![0; rank]);
            (high[rank - 2], high[rank - 1]) = (rows, columns);
            let pad = Op::Pad(Pad { low, high, value: 0.0 });
            let wide = graph.add1(pad, &[v], origin.clone(), region)?;
            padded.insert((v, rows, columns), wide);
            operands.push(wide);
        }
        let gemm = graph.add1(op, &operands, origin.clone(), region)?;
        let (size, wide) = (graph.ty(y).shape.0.clone(), graph.ty(gemm).shape.clone());
        if wide.0 == size {
            return Ok(gemm);
        }
        let (start, step) = (vec![0; size.len()], vec![1; size.len()]);
        let cut = Op::Slice(Slice { start, size, step });
        graph.add1(cut, &[gemm], origin, region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(arch: &str, mode: PadMode) -> PadTensorCores {
        let target = Target {
            device: frit_ir::plan::DeviceType::Cpu,
            arch: arch.into(),
            features: String::new(),
        };
        PadTensorCores { mode, target, fp8: Fp8::default() }
    }

    /// The choice for rows × `k` by `k` × `n` in bf16 with an f32 result.
    fn choose(arch: &str, rows: usize, k: usize, n: usize) -> Option<Choice> {
        let (dtype, out) = (DType::BF16, DType::F32);
        let gemm = GemmShape { dtype, out, batch: 1, m: rows, n, k, trans: [false, true] };
        pass(arch, PadMode::Auto).choose(&gemm, false)
    }

    #[test]
    fn the_vocabulary_of_gpt2_is_padded_to_whole_lines() {
        for arch in ["sm_80", "sm_90"] {
            let choice = choose(arch, 8192, 768, 50257).unwrap();
            assert!(choice.taken && choice.growth.n == 50304 - 50257, "{choice:?}");
            assert!(choice.before / choice.after > 1.3, "{choice:?}");
        }
    }

    #[test]
    fn odd_hidden_sizes_are_padded_where_there_is_enough_to_compute() {
        let choice = choose("sm_90", 16384, 253, 4096).unwrap();
        assert!(choice.taken && choice.growth.k == 3, "{choice:?}");
        // Few rows are bound by memory: copies cost more than they save.
        assert!(!choose("sm_90", 4, 253, 1024).unwrap().taken);
    }

    #[test]
    fn eight_bit_floats_want_multiples_of_16_everywhere() {
        let eighth = |m: usize, k: usize, n: usize| {
            let (dtype, out) = (DType::BF16, DType::F32);
            let gemm = GemmShape { dtype, out, batch: 1, m, n, k, trans: [false, true] };
            pass("sm_90", PadMode::Auto).choose(&gemm, true)
        };
        // 8 elements of bf16 are 16 bytes: aligned, but not for 8-bit floats.
        assert_eq!(choose("sm_90", 8192, 4096, 4096), None);
        for (sizes, grown) in [
            ((8192, 4104, 4096), [8192, 4112, 4096]),
            ((8200, 4096, 4096), [8208, 4096, 4096]),
            ((8192, 4096, 4088), [8192, 4096, 4096]),
        ] {
            let choice = eighth(sizes.0, sizes.1, sizes.2).unwrap();
            let Growth { m, n, k, .. } = choice.growth;
            let found = [sizes.0 + m, sizes.1 + k, sizes.2 + n];
            assert!(choice.taken && found.iter().all(|size| size % 16 == 0), "{choice:?}");
            assert!(grown.iter().zip(found).all(|(least, size)| size >= *least), "{choice:?}");
        }
        // One row is not padded to sixteen: the matmul is unchanged.
        assert_eq!(eighth(1, 4096, 4096), None);
    }

    #[test]
    fn a_processor_that_packs_its_operands_pads_nothing() {
        let choice = choose("znver5", 8192, 768, 50257).unwrap();
        assert!(!choice.taken && !choice.own && choice.after < choice.before);
        assert_eq!(choose("znver5", 8192, 768, 50304), None);
    }
}

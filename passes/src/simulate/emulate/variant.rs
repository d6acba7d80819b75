//! What makes emulated runs differ beside the system: how the model writes its attention, the version of Inductor, and which of its
//! implementations the optimizer has.

use crate::cost::Device;
use crate::cost::kernel::is_matrix;
use frit_ir::ops::OptimizerKind;
use frit_ir::plan::{Action, BufferId, Place, Plan, Task};
use frit_ir::{Graph, Op, Region, ValueId};
use std::collections::HashMap;

/// How the emulated model computes attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// By one kernel, with scores that never are in memory.
    Fused,
    /// The same, on operands that are made as torchtitan's Llama makes them. Query and key are rotated as complex numbers of f32, for
    /// which Inductor generates no code: one kernel widens, an eager one multiplies, a third rounds. Keys and values of fewer heads
    /// are repeated in memory, and their gradients are summed.
    Complex,
    /// By operations on all scores, in memory: matmul, scale, mask, softmax, dropout, matmul.
    Written,
}

/// A version of Inductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inductor {
    /// 2.10 or later.
    Current,
    /// Before 2.10: the gradients of a norm for scale and bias are a kernel of their own.
    Before210,
}

/// How AdamW is implemented.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdamW {
    /// `fused=True`: one pass.
    Fused,
    /// `foreach=True`, the default on GPUs: a kernel per operation, over all parameters.
    Foreach,
}

/// How often AdamW by operations moves an element more than the fused one, which moves seven: decay of the parameter 2, mean 3,
/// square 2 + 3, its root 2, two corrections of it 2 each, step 4.
const FOREACH: u64 = 20 - 7;

/// Seconds by which AdamW by operations takes longer than fused, in a kernel with this body.
pub(super) fn foreach_seconds(device: &Device, body: &Graph) -> f64 {
    let adam = |op: &Op| match op {
        Op::OptimizerStep(step) => {
            matches!(step.kind, OptimizerKind::Adamw | OptimizerKind::Adam)
        }
        _ => false,
    };
    let steps = body.nodes().filter(|(_, n)| adam(&n.op));
    let bytes: u64 = steps.map(|(_, n)| body.ty(n.inputs[0]).bytes() as u64).sum();
    if bytes == 0 { 0.0 } else { device.copy_seconds(FOREACH * bytes) }
}

/// Seconds of a kernel that computes the gradients of a norm for scale and bias, which Inductor before 2.10 has beside the one for the
/// gradient of its input: it reads again what that reads.
pub(super) fn column_seconds(device: &Device, body: &Graph) -> f64 {
    let of_input = |op: &Op| matches!(op, Op::LayerNormGradInput(_) | Op::RmsNormGradInput(_));
    if !body.nodes().any(|(_, n)| of_input(&n.op)) {
        return 0.0;
    }
    let columns = |op: &Op| matches!(op, Op::LayerNormGradAffine(_) | Op::RmsNormGradScale(_));
    let bytes = |v: &ValueId| body.ty(as_stored(body, *v)).bytes() as u64;
    let of = |node: &frit_ir::Node| {
        device.copy_seconds(node.inputs.iter().chain(&node.outputs).map(bytes).sum())
    };
    body.nodes().filter(|(_, n)| columns(&n.op)).map(|(_, n)| of(n)).sum()
}

/// The value that a view or a cast in a kernel's body shows.
fn as_stored(body: &Graph, mut value: ValueId) -> ValueId {
    while let Op::Cast(_) | Op::Reshape(_) | Op::Transpose(_) = body.def(value).op {
        value = body.def(value).inputs[0];
    }
    value
}

/// The operands of attention in a plan, and their gradients: in how many heads each is used per head that it has.
pub(super) struct Operands {
    shared: HashMap<BufferId, usize>,
}

impl Operands {
    /// Of all attention in a plan.
    pub(super) fn of(plan: &Plan) -> Operands {
        let mut shared = HashMap::new();
        for task in &plan.tasks {
            let Action::Kernel { kernel, reads, writes } = &task.action else { continue };
            let body = &plan.kernels[*kernel].body;
            for (_, node) in body.nodes() {
                // Query heads for each head of the key, which is the operand at `key`.
                let sharing = |key: usize| {
                    let heads = |i: usize| body.ty(node.inputs[i]).shape.dims()[1];
                    heads(key - 1) / heads(key).max(1)
                };
                if let Op::Attention(_) = node.op {
                    let key = body.ty(node.inputs[1]).shape.numel();
                    let times = |p: &Place| if p.ty.shape.numel() == key { sharing(1) } else { 1 };
                    shared.extend(reads.iter().map(|place| (place.buffer, times(place))));
                }
                if let Op::AttentionGrad(_) = node.op {
                    for (place, output) in writes.iter().zip(&body.outputs) {
                        let value = as_stored(body, output.value);
                        match node.outputs.iter().position(|v| *v == value) {
                            Some(0) => shared.insert(place.buffer, 1),
                            Some(1) => shared.insert(place.buffer, sharing(2)),
                            _ => None,
                        };
                    }
                }
            }
        }
        Operands { shared }
    }

    /// Seconds by which a kernel takes longer that rotates queries and keys, or their gradients, if it does so as [`Attention::Complex`].
    /// Each is read and written once in the plan's dtype; here widening writes f32, the product reads and writes it, and rounding
    /// reads it. A value is repeated, and its gradient summed, where the key of its size is.
    pub(super) fn rotation_seconds(
        &self,
        plan: &Plan,
        device: &Device,
        task: &Task,
        body: &Graph,
    ) -> f64 {
        let Action::Kernel { reads, writes, .. } = &task.action else { return 0.0 };
        let rotated = if task.region == Region::Forward { writes } else { reads };
        let multiplies = body.nodes().any(|(_, n)| is_matrix(&n.op));
        if multiplies || !plan.compute_dtype.is_low_precision() {
            return 0.0;
        }
        let of = |place: &Place| {
            let Some(&times) = self.shared.get(&place.buffer) else { return 0.0 };
            let (elements, times) = (place.ty.shape.numel() as u64, times as u64);
            let product = 2.0 * device.copy_seconds(8 * elements);
            if times == 1 {
                return product;
            }
            // By a kernel that there is anyway the key is written, or its gradient read, as often; one more copies or sums the value.
            product + device.copy_seconds((times - 1 + times + 1) * place.ty.bytes() as u64)
        };
        rotated.iter().map(of).sum()
    }
}

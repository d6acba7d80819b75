//! Kernels and the tasks that run them: one kernel for equal bodies, and the generated kernels that others launch.

use super::{Lowering, body};
use crate::cost::kernel::body_bytes;
use frit_ir::ops::FusionKind;
use frit_ir::plan::{Action, Entry, Kernel, KernelId, KernelKind, Place, Stream, Task};
use frit_ir::{Graph, Node, Op};

impl Lowering<'_> {
    /// Appends a task that runs a kernel; equal bodies share one. `region` is how a generated one is
    /// compiled.
    pub(super) fn run_kernel(
        &mut self,
        kind: KernelKind,
        region: FusionKind,
        body: Graph,
        reads: Vec<Place>,
        writes: Vec<Place>,
        node: &Node,
    ) {
        let flops = body::flops(&body);
        let operands = reads.iter().chain(&writes).map(|p| p.ty.bytes() as u64).sum();
        let bytes = body_bytes(&body, operands);
        let kernel = self.kernel(kind, region, body, bytes);
        let name = self.plan.kernels[kernel].name.clone();
        let cost_us = self.kernel_us[kernel];
        let lowered = self.plan.tasks.len();
        writes.iter().for_each(|place| self.written.write(place, lowered));
        let action = Action::Kernel { kernel, reads, writes };
        self.plan.tasks.push(Task {
            lowered,
            operands_digest: String::new(),
            name,
            stream: Stream::Compute,
            region: node.region,
            origin: node.origin.clone(),
            action,
            waits: vec![],
            flops,
            bytes,
            cost_us,
        });
    }

    /// The kernel of a body that moves so many bytes; equal bodies share one.
    fn kernel(
        &mut self,
        kind: KernelKind,
        region: FusionKind,
        body: Graph,
        bytes: u64,
    ) -> KernelId {
        let text = body.to_string();
        if let Some(&kernel) = self.kernel_of_body.get(&(kind, text.clone())) {
            return kernel;
        }
        let (mut entry, generated) = (self.options.entry)(&body, kind, region);
        if let Entry::Launches(selected) = &mut entry {
            let mut linked = Vec::with_capacity(generated.len());
            for (body, region) in generated {
                let bytes = body_bytes(&body, operand_bytes(&body));
                let kernel = self.kernel(KernelKind::Generated, region, body, bytes);
                linked.push((kernel, self.plan.kernels[kernel].entry.scratch_bytes()));
            }
            selected.link(&linked);
        }
        let kernel = self.plan.kernels.next_key();
        let name = format!("{}_{kernel}", body::main_op(&body));
        self.kernel_us.push(1e6 * self.cluster.device.kernel_seconds(&body, bytes));
        self.plan.kernels.push(Kernel::new(name, body, entry));
        if kind == KernelKind::Generated {
            self.regions.push((kernel, region));
        }
        self.kernel_of_body.insert((kind, text), kernel);
        kernel
    }
}

/// Bytes of what a body reads and writes.
fn operand_bytes(body: &Graph) -> u64 {
    let inputs = body.nodes().filter(|(_, n)| matches!(n.op, Op::Input(_)));
    let reads = inputs.map(|(_, n)| n.outputs[0]);
    let all = reads.chain(body.outputs.iter().map(|o| o.value));
    all.map(|v| body.ty(v).bytes() as u64).sum()
}

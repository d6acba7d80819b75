//! Detects batch normalizations that an evaluation-mode export folded into the preceding convolutions, which therefore do not
//! train as in the module.
//!
//! The TorchScript exporter stores such a convolution's weight and bias under generated names (`onnx::Conv_193`); the dynamo
//! exporter keeps the weight's name, and lists running statistics that no node reads.

use super::Importer;
use super::trainable::{is_from_module, listed};
use frit_ir::{Code, Diagnostic, Origin};
use std::collections::HashSet;

impl Importer<'_> {
    /// Warns of folded batch normalizations.
    pub(super) fn folded_batch_norms(&mut self) {
        if !self.from_pytorch {
            return;
        }
        let buffers = listed(self.source, "BUFFER");
        let statistics = buffers.values().filter(|target| target.ends_with("running_mean")).count();
        // Also those whose results nothing reads.
        let norms = self.source.node.iter().filter(|n| n.op_type == "BatchNormalization").count();
        let stored: HashSet<&str> =
            self.source.initializer.iter().map(|t| t.name.as_str()).collect();
        let is_exporters = |name: &String| stored.contains(name.as_str()) && !is_from_module(name);
        let is_convolution = |op: &str| matches!(op, "Conv" | "ConvTranspose");
        let convolutions: Vec<_> =
            self.nodes.iter().map(|(_, n)| *n).filter(|n| is_convolution(&n.op_type)).collect();
        let folded: Vec<_> = convolutions
            .iter()
            .filter(|n| n.input.len() == 3 && n.input[1..].iter().all(is_exporters))
            .collect();
        let (n, of) = match (folded.first(), statistics.saturating_sub(norms)) {
            (Some(first), _) => (folded.len(), *first),
            (None, missing @ 1..) if !convolutions.is_empty() => (missing, &convolutions[0]),
            _ => return,
        };
        let weight = &of.input[1];
        let message = format!(
            "{n} batch normalization(s) were folded into convolutions, which train without them, such as `{weight}`"
        );
        let help = "export the module in training mode: net.train(), and for the TorchScript exporter \
                    training=TrainingMode.PRESERVE and do_constant_folding=False, for the other one \
                    optimize=False (docs/exporting.md)";
        let warning = Diagnostic::warning(Code::BatchNormFolded, message)
            .at(&Origin::new(&of.name, &super::scope::of(of)))
            .note("the trained weights cannot be loaded back into the module")
            .help(help);
        self.warnings.push(warning);
    }
}

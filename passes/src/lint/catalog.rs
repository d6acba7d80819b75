//! The table of lints; `docs/lints.md` is generated from it.

use std::fmt::Write;

/// How a finding is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The plan is not written unless the lint is allowed.
    Error,
    /// Printed when the plan is compiled.
    Warning,
    /// Noted in the plan.
    Info,
    /// A bug in Frit, printed as a warning.
    Defect,
    /// Cannot occur: excluded by construction or by verification.
    Impossible,
}

impl Level {
    /// Name in documents.
    pub fn name(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Info => "info",
            Level::Defect => "defect",
            Level::Impossible => "impossible",
        }
    }
}

/// One lint.
#[derive(Clone, Copy, Debug)]
pub struct Lint {
    /// Stable id.
    pub id: &'static str,
    /// How a finding is treated.
    pub level: Level,
    /// The problem it finds, and why that matters.
    pub what: &'static str,
    /// What to do; for impossible ones, why they are.
    pub remedy: &'static str,
    /// The test that it is found where it should be and not elsewhere, or that it cannot be.
    pub test: &'static str,
}

const fn lint(
    id: &'static str,
    level: Level,
    what: &'static str,
    remedy: &'static str,
    test: &'static str,
) -> Lint {
    Lint { id, level, what, remedy, test }
}

/// All lints, in order.
#[rustfmt::skip]
pub const LINTS: [Lint; 25] = [
    lint("L01", Level::Impossible, "gradients are clipped or inspected before they are unscaled",
        "`verify_plan` tracks the factor of every gradient: gradients that are clipped have exactly the factor of the mean (P308)",
        "the_factor_of_every_gradient"),
    lint("L02", Level::Error, "f16 without loss scaling: gradients below 6e-8 become zero",
        "set precision.loss_scale = \"dynamic\"; or compute in bf16, if the model itself is not in f16",
        "l02_and_l03_loss_scaling"),
    lint("L03", Level::Warning, "a fixed loss scale with f16: nothing lowers it when gradients overflow, and every such step is skipped",
        "set precision.loss_scale = \"dynamic\"",
        "l02_and_l03_loss_scaling"),
    lint("L04", Level::Impossible, "schedule, moving average or step count advances on a skipped step",
        "all of them read the flag of the finite check, which `verify_plan` enforces (P307, P311, P313)",
        "state_changes_once_and_by_the_checked_flag"),
    lint("L05", Level::Impossible, "the loss scale is updated during accumulation",
        "it is updated once, in the phase `update`, which runs once per step (P313)",
        "state_changes_once_and_by_the_checked_flag"),
    lint("L06", Level::Impossible, "ranks disagree on whether a step is skipped",
        "the statistics that decide this are summed over ranks first (P306)",
        "the_update"),
    lint("L07", Level::Impossible, "the loss is scaled on a path where gradients are not unscaled, or the reverse",
        "`verify_plan` tracks the scale through every operation from the seed to the optimizer (P303, P304, P308, P309)",
        "the_factor_of_every_gradient"),
    lint("L08", Level::Impossible, "the loss or its scale is not f32 (65536 is infinite in f16)",
        "the backward seed and all scaler state are f32 by type rules, and losses are f32 under autocast",
        "loss_and_scale_are_f32"),
    lint("L09", Level::Impossible, "a collective inside a branch that a skipped step does not execute",
        "plans have no branches: a skipped step runs the same tasks, and the optimizer writes back what it read",
        "a_skipped_step_runs_the_same_collectives"),
    lint("L10", Level::Warning, "bf16 on a GPU below sm_80, which has no bf16 hardware",
        "compute in fp16 with loss scaling, or in fp32",
        "l10_bf16_needs_sm_80"),
    lint("L11", Level::Error, "f16 and bf16 in one plan: one needs loss scaling and the other does not, and casts between them lose information",
        "use one of them; export the model in fp32 and let precision.compute decide",
        "l11_two_low_precisions"),
    lint("L12", Level::Warning, "gradients are reduced in a precision too low for their sum: f16 overflows, bf16 loses small terms in sums of more than 64",
        "set sharding.reduce_dtype = \"fp32\"",
        "l12_reductions_in_low_precision"),
    lint("L13", Level::Info, "parameters are gathered in fp32 but used in low precision: twice the traffic",
        "set sharding.param_dtype = \"auto\"",
        "l13_parameters_gathered_in_fp32"),
    lint("L14", Level::Info, "a trainable initializer is stored in f16 or bf16; it is trained in an f32 copy",
        "none needed; exports convert it back to its stored dtype",
        "l14_stored_in_low_precision"),
    lint("L15", Level::Impossible, "evaluation computes in another precision than training",
        "both are compiled by the same passes with the same options",
        "evaluation_computes_as_training_does"),
    lint("L16", Level::Info, "the predicted speed-up over fp32 is below 1.1: the model is tiny or memory-bound",
        "measure with `frit bench`; set precision.compute = \"fp32\" if it agrees",
        "a_tiny_model_gains_nothing"),
    lint("L17", Level::Warning, "exp, log, pow, a sum or a norm is forced to low precision",
        "leave it to the policy, or force only matmuls and convolutions",
        "an_unsafe_operation_forced_to_low_precision"),
    lint("L18", Level::Warning, "a constant, mask or weight becomes 0 or infinite in the dtype of its use, or two saturated masks are added before a softmax",
        "compute this node in fp32 with a precision override; for masks, combine the conditions with `and` and fill once with `where`",
        "l18_masks_that_are_added"),
    lint("L19", Level::Warning, "an f16 result may exceed 65504, given the ranges of its operands and the weights",
        "compute in bf16, or use a precision override to run this scope in fp32",
        "l19_matmuls_beyond_f16"),
    lint("L20", Level::Warning, "a loss that expects logits receives probabilities, or the logarithm of a sigmoid is taken: saturated values give infinities and zero gradients",
        "pass the logits to the loss: loss.kind = \"bce_with_logits\" or \"cross_entropy\" on the output before the sigmoid or softmax",
        "l20_losses_of_probabilities"),
    lint("L21", Level::Warning, "integers stored as floats exceed the exact range: 2048 in f16, 256 in bf16; or may, where a matmul reads an input of unknown range",
        "keep positions, counts and coordinates in integers, or in fp32 with a precision override for this scope",
        "l21_integers_in_floats"),
    lint("L22", Level::Warning, "learning rate times weight decay is below the resolution of the parameters, which do not decay",
        "raise optimizer.weight_decay, or set it to 0 if no decay is intended",
        "l22_decay_below_the_resolution"),
    lint("L23", Level::Info, "a matmul whose rows are not aligned for tensor cores, the padding that aligns it and the predicted gain",
        "set padding.tensor_cores = \"auto\"",
        "unaligned_matmuls_are_noted_with_the_padding_that_aligns_them"),
    lint("L24", Level::Defect, "a value is cast to another dtype and back, but where the model, `precision.pure` or `sharding.param_dtype` rounds values",
        "this is a bug in Frit, not in the model: please report it",
        "casts_there_and_back"),
    lint("L25", Level::Info, "an fp32 scalar widens a whole branch",
        "make it a constant, which adapts to any dtype, or force this operation to low precision with an override",
        "l25_a_scalar_that_widens"),
];

/// The lint of this id.
///
/// # Panics
/// If there is none.
pub fn find(id: &str) -> &'static Lint {
    LINTS.iter().find(|l| l.id == id).expect("invariant: ids of findings are in the list")
}

/// The page `docs/lints.md`.
pub fn page() -> String {
    let mut page = String::from(
        "# Lints\n\n\
         Static checks of precision by `frit compile`. Warnings are printed; an error prevents the\n\
         plan from being written. `--allow ID`, or `lints.allow = [\"ID\"]` in train.toml, demotes a finding to a note. The plan records\n\
         all findings: `frit inspect PLAN --view lints [--json]`.\n\n\
         Bounds come from interval arithmetic over the graph: `data.ranges = [\"pixels=-3..3\"]` declares the range of an input,\n\
         weights and normalizations determine the others. Values without a known bound are not checked.\n\n\
         Findings marked impossible cannot occur in a plan; the remedy says why. The last column names the test that shows a finding\n\
         where it is expected and none elsewhere, or that it cannot occur.\n\n\
         | id | severity | finds | remedy | test |\n|---|---|---|---|---|\n",
    );
    for lint in &LINTS {
        // Writing to a string does not fail.
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | `{}` |",
            lint.id,
            lint.level.name(),
            lint.what,
            lint.remedy,
            lint.test
        );
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_numbers_in_order() {
        for (i, lint) in LINTS.iter().enumerate() {
            assert_eq!(lint.id, format!("L{:02}", i + 1));
        }
    }

    #[test]
    fn the_page_is_up_to_date() {
        expect_test::expect_file!["../../../docs/lints.md"].assert_eq(&page());
    }
}

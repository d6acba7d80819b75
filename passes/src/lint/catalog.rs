//! The list of lints, from which `docs/lints.md` is written.

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
    /// A mistake of Frit, printed as a warning.
    Defect,
    /// Cannot occur: plans are made, or proved, so that it does not.
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
    /// What it finds, and why that matters.
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
        "`verify_plan` follows the factor of every gradient: what is clipped has exactly the factor of the mean (P308)",
        "the_factor_of_every_gradient"),
    lint("L02", Level::Error, "f16 without loss scaling: gradients below 6e-8 become zero",
        "set precision.loss_scale = \"dynamic\", or compute in bf16",
        "l02_and_l03_loss_scaling"),
    lint("L03", Level::Warning, "a fixed loss scale with f16: nothing lowers it when gradients overflow, and every such step is skipped",
        "set precision.loss_scale = \"dynamic\"",
        "l02_and_l03_loss_scaling"),
    lint("L04", Level::Impossible, "schedule, moving average or step count advance on a skipped step",
        "all of them read the flag that the finite check wrote; `verify_plan` refuses one that does not (P307, P311, P313)",
        "state_changes_once_and_by_the_checked_flag"),
    lint("L05", Level::Impossible, "the loss scale is updated within accumulation",
        "it is updated once, in the phase `update`, which runs once per step (P313)",
        "state_changes_once_and_by_the_checked_flag"),
    lint("L06", Level::Impossible, "ranks do not agree whether a step is skipped",
        "the statistics that decide are summed over ranks before they are read (P306)",
        "the_update"),
    lint("L07", Level::Impossible, "the loss is scaled on a path on which gradients are not unscaled, or the other way round",
        "`verify_plan` follows the scale through every operation from the seed to the optimizer (P303, P304, P308, P309)",
        "the_factor_of_every_gradient"),
    lint("L08", Level::Impossible, "the loss or its scaling is not f32, where 65536 is infinite in f16",
        "the seed of the backward pass and all scaler state are f32 by the rules of the operations, and losses are f32 under autocast",
        "loss_and_scale_are_f32"),
    lint("L09", Level::Impossible, "a collective within the branch that a skipped step leaves out",
        "plans have no branches: a skipped step runs the same tasks, and the optimizer writes back what it read",
        "a_skipped_step_runs_the_same_collectives"),
    lint("L10", Level::Warning, "bf16 for a GPU below sm_80, which has no units for it",
        "compute in fp16 with loss scaling, or in fp32",
        "l10_bf16_needs_sm_80"),
    lint("L11", Level::Error, "f16 and bf16 in one plan: one needs loss scaling and the other does not, and each cast between them loses",
        "use one of them; export the model in fp32 and let precision.compute decide",
        "l11_two_low_precisions"),
    lint("L12", Level::Warning, "gradients are reduced in a low precision that their sum does not fit: f16 overflows, bf16 loses small terms of more than 64",
        "set sharding.reduce_dtype = \"fp32\"",
        "l12_reductions_in_low_precision"),
    lint("L13", Level::Info, "parameters are gathered in fp32 although they are used in low precision: twice the bytes",
        "set sharding.param_dtype = \"auto\"",
        "l13_parameters_gathered_in_fp32"),
    lint("L14", Level::Info, "a trainable initializer is stored in f16 or bf16; it is trained in an f32 copy",
        "nothing; exports write it back in its own dtype",
        "l14_stored_in_low_precision"),
    lint("L15", Level::Impossible, "evaluation computes in another precision than training",
        "both are compiled by the same passes with the same options",
        "evaluation_computes_as_training_does"),
    lint("L16", Level::Info, "the predicted speed-up over fp32 is below 1.1: the model is tiny or bound by memory",
        "measure with `frit bench`; set precision.compute = \"fp32\" if it agrees",
        "a_tiny_model_gains_nothing"),
    lint("L17", Level::Warning, "exp, log, pow, a sum or a norm is forced to low precision",
        "leave it to the policy, or force only contractions",
        "an_unsafe_operation_forced_to_low_precision"),
    lint("L18", Level::Warning, "a constant, mask or weight becomes 0 or infinite in the dtype it is used in, or two saturated masks are added before a softmax",
        "compute this node in fp32 with a precision override; for masks, combine the conditions with `and` and fill once with `where`",
        "l18_masks_that_are_added"),
    lint("L19", Level::Warning, "a result in f16 may exceed 65504, by the bound of its operands and the size of the weights",
        "compute in bf16, or this scope in fp32 with a precision override",
        "l19_products_beyond_f16"),
    lint("L20", Level::Warning, "probabilities in a loss that is computed from logits, or the logarithm of a sigmoid: saturated ones give infinities and zero gradients",
        "give the loss the logits: loss.kind = \"bce_with_logits\" or \"cross_entropy\" on the output before the sigmoid or softmax",
        "l20_losses_of_probabilities"),
    lint("L21", Level::Warning, "integers kept as floats beyond the last one that is exact: 2048 in f16, 256 in bf16",
        "keep positions, counts and coordinates in integers or fp32: a precision override for this scope",
        "l21_integers_in_floats"),
    lint("L22", Level::Warning, "learning rate times weight decay is below the resolution of the parameters: they do not decay",
        "raise optimizer.weight_decay, or set it to 0 if no decay is meant",
        "l22_decay_below_the_resolution"),
    lint("L23", Level::Info, "a product whose rows are not aligned for matrix units, the padding that aligns it and its predicted gain",
        "set padding.tensor_cores = \"auto\"",
        "unaligned_products_are_noted_with_the_padding_that_aligns_them"),
    lint("L24", Level::Defect, "a value is cast to another dtype and back",
        "this is a mistake of frit, not of the model: please report it",
        "casts_there_and_back"),
    lint("L25", Level::Info, "a scalar in fp32 widens a whole branch",
        "make it a constant, which takes any dtype, or force this operation to low precision with an override",
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
         Advice that `frit compile` gives about precision, before anything runs. Warnings are printed; an error keeps the\n\
         plan from being written. `--allow ID`, or `lints.allow = [\"ID\"]` in train.toml, makes a finding a note. All findings are in\n\
         the plan: `frit inspect PLAN --view lints [--json]`.\n\n\
         Bounds come from interval arithmetic over the graph: `data.ranges = [\"pixels=-3..3\"]` declares the range of an input,\n\
         weights and normalizations give the rest. What nothing bounds is not judged.\n\n\
         Impossible ones are mistakes that a plan cannot contain; the remedy says why. The last column names the test that shows a\n\
         finding where it should be and none elsewhere, or that it cannot be.\n\n\
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

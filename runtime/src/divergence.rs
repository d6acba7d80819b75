//! Detects runs that have failed: a non-finite loss or parameter, only skipped steps, or only gradients that are zero.
//!
//! A step with non-finite gradients is skipped and changes no parameter; a few are normal, and dynamic loss scaling relies on
//! them. A non-finite loss in a step that is taken ends the run at once, as do many consecutive skipped steps; nothing is saved
//! then. A run that skipped all steps, whose last loss is not finite, or that began with the first step, took ten or more and never
//! had a gradient other than zero, ends normally but is reported as failed. A few steps, the part before an interruption, or the rest of
//! a run that is resumed may have none.

use std::fmt;

/// Default number of consecutive skipped steps that end a run.
pub const MAX_SKIPPED: usize = 100;

/// Steps without a gradient after which a run is warned of, and has failed if it ends so; it goes on, since its data may differ later.
pub(crate) const NO_GRADIENT: usize = 10;

/// Why a run has failed; steps are numbered as in its metrics.
#[derive(Clone, Debug, PartialEq)]
pub enum Divergence {
    /// A step was taken though its loss is not finite.
    Loss {
        /// The step.
        step: usize,
        /// Its loss.
        loss: f64,
    },
    /// This many consecutive steps were skipped.
    Skipped {
        /// The last of them.
        step: usize,
        /// How many.
        steps: usize,
    },
    /// A parameter is not finite.
    Parameter {
        /// Steps that were run.
        steps: usize,
        /// Its name.
        name: String,
    },
    /// All steps were skipped.
    AllSkipped {
        /// How many.
        steps: usize,
    },
    /// The gradients of all steps are zero.
    NoGradient {
        /// How many.
        steps: usize,
    },
    /// The loss of the last step is not finite.
    LastLoss {
        /// The step.
        step: usize,
        /// Its loss.
        loss: f64,
    },
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Divergence::Loss { step, loss } => {
                write!(f, "the loss of step {step} is {loss}, and its update was made")
            }
            Divergence::Skipped { step, steps } => write!(
                f,
                "the last {steps} steps, up to step {step}, were skipped: their gradients are not finite"
            ),
            Divergence::Parameter { steps, name } => {
                write!(f, "after {steps} steps the parameter `{name}` is not finite")
            }
            Divergence::AllSkipped { steps } => write!(
                f,
                "every step was skipped ({steps}): the gradients are not finite, and no parameter has changed"
            ),
            Divergence::NoGradient { steps } => {
                write!(f, "the norm of the gradients is zero in every step ({steps})")
            }
            Divergence::LastLoss { step, loss } => {
                write!(f, "the loss of the last step, step {step}, is {loss}")
            }
        }
    }
}

impl Divergence {
    /// Whether the run ends at once, and nothing of its state is saved.
    pub fn is_final(&self) -> bool {
        !matches!(
            self,
            Divergence::AllSkipped { .. }
                | Divergence::NoGradient { .. }
                | Divergence::LastLoss { .. }
        )
    }

    /// What to check.
    pub fn help(&self) -> &'static str {
        match self.is_final() {
            _ if matches!(self, Divergence::NoGradient { .. }) => NO_GRADIENT_HELP,
            true => {
                "checkpoints from before are kept, and nothing was saved now; look at the data of these steps \
                 and at optimizer.lr; --check-numerics names the first operation with such a result"
            }
            false => {
                "look at the data, at optimizer.lr and, in fp16, at precision.init_scale; --check-numerics names \
                 the first operation with such a result"
            }
        }
    }
}

/// What to check if no step has a gradient.
pub(crate) const NO_GRADIENT_HELP: &str = "look at what the loss reads: constant outputs, activations that are all zero, a loss.weight of 0; \
     in fp16 raise precision.init_scale";

/// Watches the metrics of a run; they are equal on all ranks, so all reach the same decision.
#[derive(Debug, Default)]
pub(crate) struct Judge {
    limit: usize,
    in_a_row: usize,
    steps: usize,
    /// Whether it began with the first step.
    is_whole: bool,
    /// Whether a step had a gradient.
    learns: bool,
    /// Steps that were skipped.
    pub(crate) skipped: usize,
    last: Option<(usize, f64)>,
    verdict: Option<Divergence>,
}

impl Judge {
    /// Ends a run after `limit` consecutive skipped steps; `is_whole` if it begins with the first step.
    pub(crate) fn new(limit: usize, is_whole: bool) -> Judge {
        Judge { limit, is_whole, ..Judge::default() }
    }

    /// Records a step with the norm of its gradients.
    pub(crate) fn note(&mut self, step: usize, loss: f64, grad_norm: f64, skipped: bool) {
        self.steps += 1;
        self.learns |= grad_norm != 0.0 && !skipped;
        self.skipped += usize::from(skipped);
        self.in_a_row = if skipped { self.in_a_row + 1 } else { 0 };
        self.last = Some((step, loss));
        if !skipped && !loss.is_finite() {
            self.end(Divergence::Loss { step, loss });
        } else if self.in_a_row >= self.limit {
            self.end(Divergence::Skipped { step, steps: self.in_a_row });
        }
    }

    /// Whether no step has had a gradient so far, nor was skipped.
    pub(crate) fn learns_nothing(&self) -> bool {
        !self.learns && self.skipped == 0
    }

    /// Steps so far.
    pub(crate) fn steps(&self) -> usize {
        self.steps
    }

    /// Ends the run for this reason, unless it ends already.
    pub(crate) fn end(&mut self, reason: Divergence) {
        self.verdict.get_or_insert(reason);
    }

    /// Whether the run has to end at once.
    pub(crate) fn has_ended(&self) -> bool {
        self.verdict.is_some()
    }

    /// Why the run has to end at once, if it has to.
    pub(crate) fn ended(&self) -> Option<&Divergence> {
        self.verdict.as_ref()
    }

    /// The result at the end of the run, which may have been interrupted before its last step.
    pub(crate) fn verdict(self, is_interrupted: bool) -> Option<Divergence> {
        let is_judged = self.is_whole && !is_interrupted && self.steps >= NO_GRADIENT;
        let learned = !is_judged || !self.learns_nothing();
        self.verdict.or(match self.last {
            Some(_) if self.skipped == self.steps => {
                Some(Divergence::AllSkipped { steps: self.steps })
            }
            Some((step, loss)) if !loss.is_finite() => Some(Divergence::LastLoss { step, loss }),
            Some(_) if !learned => Some(Divergence::NoGradient { steps: self.steps }),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of steps after which a run with these losses and skips ends, and the result.
    fn judged(limit: usize, steps: &[(f64, bool)]) -> (usize, Option<Divergence>) {
        let mut judge = Judge::new(limit, true);
        let mut n = 0;
        for (step, (loss, skipped)) in steps.iter().enumerate() {
            judge.note(step, *loss, 1.0, *skipped);
            n += 1;
            if judge.has_ended() {
                break;
            }
        }
        (n, judge.verdict(false))
    }

    #[test]
    fn a_run_ends_where_going_on_is_worth_nothing() {
        let inf = f64::INFINITY;
        let (good, bad) = ((1.0, false), (inf, true));
        assert_eq!(judged(3, &[good; 5]), (5, None));
        assert_eq!(judged(3, &[good, bad, bad, good, bad, bad, good]), (7, None));
        let skipped = Divergence::Skipped { step: 3, steps: 3 };
        assert_eq!(judged(3, &[good, bad, bad, bad, good]), (4, Some(skipped)));
        let taken = Divergence::Loss { step: 1, loss: inf };
        assert_eq!(judged(3, &[good, (inf, false), good]), (2, Some(taken)));
        assert_eq!(judged(3, &[bad, bad]), (2, Some(Divergence::AllSkipped { steps: 2 })));
        let last = Divergence::LastLoss { step: 1, loss: inf };
        assert_eq!(judged(3, &[good, bad]), (2, Some(last)));
        // A finite loss whose scaled gradients overflow.
        assert_eq!(judged(3, &[good, (1.0, true)]), (2, None));
        assert_eq!(judged(3, &[]), (0, None));
    }

    /// The result of a run with these gradients.
    fn learned(is_whole: bool, is_interrupted: bool, norms: &[f64]) -> Option<Divergence> {
        let mut judge = Judge::new(3, is_whole);
        norms.iter().enumerate().for_each(|(i, norm)| judge.note(i, 1.0, *norm, false));
        judge.verdict(is_interrupted)
    }

    #[test]
    fn a_run_without_any_gradient_has_failed() {
        let none = [0.0; NO_GRADIENT];
        let nothing = Some(Divergence::NoGradient { steps: NO_GRADIENT });
        assert_eq!(learned(true, false, &none), nothing);
        assert!(nothing.is_some_and(|n| !n.is_final()));
        assert_eq!(learned(true, false, &[&none[..], &[1e-9, 0.0]].concat()), None);
        // A few batches may give none, what was interrupted, and the rest of a run that has learned.
        assert_eq!(learned(true, false, &none[1..]), None);
        assert_eq!(learned(true, true, &none), None);
        assert_eq!(learned(false, false, &none), None);
        assert_eq!(learned(true, false, &[]), None);
    }
}

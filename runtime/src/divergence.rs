//! Detects runs that have failed: a non-finite loss or parameter, or only skipped steps.
//!
//! A step with non-finite gradients is skipped and changes no parameter; a few are normal, and dynamic loss scaling relies on
//! them. A non-finite loss in a step that is taken ends the run at once, as do many consecutive skipped steps; nothing is saved
//! then. A run that skipped all steps, or whose last loss is not finite, ends normally but is reported as failed.

use std::fmt;

/// Default number of consecutive skipped steps that end a run.
pub const MAX_SKIPPED: usize = 100;

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
            Divergence::LastLoss { step, loss } => {
                write!(f, "the loss of the last step, step {step}, is {loss}")
            }
        }
    }
}

impl Divergence {
    /// Whether the run ends at once, and nothing of its state is saved.
    pub fn is_final(&self) -> bool {
        !matches!(self, Divergence::AllSkipped { .. } | Divergence::LastLoss { .. })
    }

    /// What to check.
    pub fn help(&self) -> &'static str {
        match self.is_final() {
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

/// Watches the metrics of a run; they are equal on all ranks, so all reach the same decision.
#[derive(Debug)]
pub(crate) struct Judge {
    limit: usize,
    in_a_row: usize,
    steps: usize,
    /// Steps that were skipped.
    pub(crate) skipped: usize,
    last: Option<(usize, f64)>,
    verdict: Option<Divergence>,
}

impl Judge {
    /// Ends a run after `limit` consecutive skipped steps.
    pub(crate) fn new(limit: usize) -> Judge {
        Judge { limit, in_a_row: 0, steps: 0, skipped: 0, last: None, verdict: None }
    }

    /// Records a step.
    pub(crate) fn note(&mut self, step: usize, loss: f64, skipped: bool) {
        self.steps += 1;
        self.skipped += usize::from(skipped);
        self.in_a_row = if skipped { self.in_a_row + 1 } else { 0 };
        self.last = Some((step, loss));
        if !skipped && !loss.is_finite() {
            self.end(Divergence::Loss { step, loss });
        } else if self.in_a_row >= self.limit {
            self.end(Divergence::Skipped { step, steps: self.in_a_row });
        }
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

    /// The result at the end of the run.
    pub(crate) fn verdict(self) -> Option<Divergence> {
        self.verdict.or(match self.last {
            Some(_) if self.skipped == self.steps => {
                Some(Divergence::AllSkipped { steps: self.steps })
            }
            Some((step, loss)) if !loss.is_finite() => Some(Divergence::LastLoss { step, loss }),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of steps after which a run with these losses and skips ends, and the result.
    fn judged(limit: usize, steps: &[(f64, bool)]) -> (usize, Option<Divergence>) {
        let mut judge = Judge::new(limit);
        let mut n = 0;
        for (step, (loss, skipped)) in steps.iter().enumerate() {
            judge.note(step, *loss, *skipped);
            n += 1;
            if judge.has_ended() {
                break;
            }
        }
        (n, judge.verdict())
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
}

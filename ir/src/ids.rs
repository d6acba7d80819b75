//! Typed indices into the tables of a plan. Files and the text form of graphs contain the bare numbers.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident,)*) => {$(
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub usize);

        impl From<usize> for $name {
            fn from(index: usize) -> $name {
                $name(index)
            }
        }

        impl From<$name> for usize {
            fn from(id: $name) -> usize {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

ids! {
    /// A row of [`crate::plan::Plan::buffers`].
    BufferId,
    /// A row of [`crate::plan::Plan::groups`].
    GroupId,
    /// A row of [`crate::plan::Plan::kernels`].
    KernelId,
    /// A row of [`crate::plan::Plan::params`].
    ParamId,
    /// A row of [`crate::plan::Plan::phases`].
    PhaseId,
    /// A row of [`crate::plan::Plan::tasks`].
    TaskId,
    /// A row of [`crate::plan::Plan::units`]; operations of a graph name units by it, too.
    UnitId,
}

impl UnitId {
    /// The unit of parameters outside of all others.
    pub const ROOT: UnitId = UnitId(0);
}

impl TaskId {
    /// The first task of a plan.
    pub const FIRST: TaskId = TaskId(0);

    /// The task after this one in list order.
    pub fn next(self) -> TaskId {
        TaskId(self.0 + 1)
    }

    /// The tasks from this one up to but excluding `end`, in list order.
    pub fn until(
        self,
        end: TaskId,
    ) -> impl DoubleEndedIterator<Item = TaskId> + ExactSizeIterator + Clone {
        (self.0..end.0).map(TaskId)
    }
}

//! Limits of the work that an import may do, since small files can request any amount.
//!
//! Work is counted rather than timed, so that a model is accepted or refused identically on every machine. The defaults suffice for
//! models with thousands of layers; the error names the key to raise.

use frit_ir::{Code, Diagnostic, Origin};

/// The largest amounts, `[import]` of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Total elements of constants computed at import.
    pub elements: u64,
    /// Operations on elements to compute constants.
    pub operations: u64,
    /// Nodes made, once functions, loops and blocks are written out.
    pub nodes: u64,
    /// Bytes of names and attributes that are copied to do so.
    pub bytes: u64,
    /// Levels of functions, graphs and blocks inside one another.
    pub depth: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { elements: 1 << 26, operations: 1 << 28, nodes: 1 << 16, bytes: 1 << 28, depth: 64 }
    }
}

/// Deeper levels would not fit the stack, whatever the configuration says.
pub const MAX_DEPTH: u64 = 256;

/// A limited resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// [`Limits::elements`]
    Elements,
    /// [`Limits::operations`]
    Operations,
    /// [`Limits::nodes`]
    Nodes,
    /// [`Limits::bytes`]
    Bytes,
    /// [`Limits::depth`]
    Depth,
}

impl Resource {
    /// Its description, and the key of its limit.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Resource::Elements => ("elements of constants", "import.max_elements"),
            Resource::Operations => ("operations to compute constants", "import.max_operations"),
            Resource::Nodes => ("nodes", "import.max_nodes"),
            Resource::Bytes => ("bytes of names and attributes", "import.max_bytes"),
            Resource::Depth => ("levels of nested graphs", "import.max_depth"),
        }
    }
}

/// A model asks for more than a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    resource: Resource,
    /// With what was made before.
    asked: u64,
    limit: u64,
}

impl Exceeded {
    /// The error; `subject` is the requester, such as the type of a node.
    pub fn diagnostic(&self, subject: &str, origin: &Origin) -> Diagnostic {
        let (what, key) = self.resource.words();
        let asked = match self.asked {
            u64::MAX => "far too many".into(),
            n => n.to_string(),
        };
        let message =
            format!("{subject}: the import would make {asked} {what}, {key} = {}", self.limit);
        let diagnostic = Diagnostic::error(Code::ImportLimit, message).at(origin);
        if self.resource == Resource::Depth && self.limit >= MAX_DEPTH {
            return diagnostic
                .help("deeper graphs cannot be read; export the model with fewer levels");
        }
        diagnostic.help(format!(
            "if the model is meant to be this large, raise the limit: --set \
            {key}=N"
        ))
    }
}

/// The remaining limits during one import.
#[derive(Clone, Debug)]
pub struct Budget {
    limits: Limits,
    elements: u64,
    operations: u64,
    nodes: u64,
    bytes: u64,
}

impl Budget {
    /// Nothing is made yet.
    pub fn new(limits: Limits) -> Self {
        Budget { limits, elements: 0, operations: 0, nodes: 0, bytes: 0 }
    }

    /// Counts elements or nodes before they are created.
    ///
    /// # Errors
    /// If that is more than the limit; nothing may be made then.
    pub fn charge(&mut self, resource: Resource, amount: u64) -> Result<(), Exceeded> {
        let exceeded = self.room(resource, amount);
        let used = match resource {
            Resource::Elements => &mut self.elements,
            Resource::Operations => &mut self.operations,
            Resource::Nodes => &mut self.nodes,
            Resource::Bytes => &mut self.bytes,
            Resource::Depth => return exceeded,
        };
        *used = used.saturating_add(amount);
        exceeded
    }

    /// Whether so much more may be made; nothing is counted. Of [`Resource::Depth`] the amount is the whole depth.
    ///
    /// # Errors
    /// If that is more than the limit.
    pub fn room(&self, resource: Resource, amount: u64) -> Result<(), Exceeded> {
        let (used, limit) = self.of(resource);
        let asked = used.saturating_add(amount);
        if asked > limit { Err(Exceeded { resource, asked, limit }) } else { Ok(()) }
    }

    /// Whether constants of so many elements, by so many operations, may be made of what need not be: they leave half
    /// of the limits to what must be known at import.
    pub fn affords(&self, elements: u64, operations: u64) -> bool {
        let fits = |resource, amount: u64| {
            let (used, limit) = self.of(resource);
            used.saturating_add(amount) <= limit / 2
        };
        fits(Resource::Elements, elements) && fits(Resource::Operations, operations)
    }

    fn of(&self, resource: Resource) -> (u64, u64) {
        match resource {
            Resource::Elements => (self.elements, self.limits.elements),
            Resource::Operations => (self.operations, self.limits.operations),
            Resource::Nodes => (self.nodes, self.limits.nodes),
            Resource::Bytes => (self.bytes, self.limits.bytes),
            Resource::Depth => (0, self.limits.depth.min(MAX_DEPTH)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_counted_and_the_key_is_named() {
        let mut budget = Budget::new(Limits { nodes: 10, ..Limits::default() });
        assert_eq!(budget.charge(Resource::Nodes, 10), Ok(()));
        let error = budget.charge(Resource::Nodes, u64::MAX).unwrap_err();
        let diagnostic = error.diagnostic("Loop", &Origin::new("n", "h.0"));
        assert_eq!(diagnostic.code, "E017");
        let text = diagnostic.to_string();
        for part in ["node \"n\"", "Loop", "far too many nodes", "import.max_nodes = 10"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn what_need_not_be_made_leaves_half() {
        let mut budget = Budget::new(Limits { elements: 100, ..Limits::default() });
        assert!(budget.affords(50, 0) && !budget.affords(51, 0));
        budget.charge(Resource::Elements, 60).unwrap();
        assert!(!budget.affords(1, 0));
        assert!(budget.room(Resource::Elements, 40).is_ok());
    }

    #[test]
    fn depth_has_an_end_of_its_own() {
        let budget = Budget::new(Limits { depth: u64::MAX, ..Limits::default() });
        assert!(budget.room(Resource::Depth, MAX_DEPTH).is_ok());
        assert!(budget.room(Resource::Depth, MAX_DEPTH + 1).is_err());
    }
}

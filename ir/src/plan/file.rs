//! `plan.json`: writing, reading, and the refusal of other versions.

use super::Plan;

/// Version of the format of `plan.json`. Plans of other versions are refused.
pub const FORMAT_VERSION: u32 = 2;

/// Why a text is not a plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// Not JSON, or not of this shape.
    #[error("not a plan: {0}")]
    Syntax(#[from] serde_json::Error),
    /// A plan of another version.
    #[error(
        "the plan has format version {found}, this program reads version {FORMAT_VERSION}; \
         compile the model again"
    )]
    Version {
        /// Its version.
        found: u64,
    },
}

impl Plan {
    /// The text of `plan.json`: equal plans give equal bytes.
    pub fn to_json(&self) -> String {
        let mut text =
            serde_json::to_string_pretty(self).expect("invariant: a plan serializes to JSON");
        text.push('\n');
        text
    }

    /// Reads the text of `plan.json`.
    ///
    /// # Errors
    /// If it is not a plan, or one of another format version.
    pub fn from_json(text: &str) -> Result<Plan, PlanError> {
        #[derive(serde::Deserialize)]
        struct Version {
            format_version: u64,
        }
        let Version { format_version: found } = serde_json::from_str(text)?;
        if found != u64::from(FORMAT_VERSION) {
            return Err(PlanError::Version { found });
        }
        Ok(serde_json::from_str(text)?)
    }

    /// SHA-256 of the plan's text, in hexadecimal: what ranks compare before they start.
    pub fn hash(&self) -> String {
        sha256_hex(self.to_json().as_bytes())
    }
}

/// SHA-256 in hexadecimal.
pub fn sha256_hex(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

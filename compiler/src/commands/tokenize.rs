//! `frit tokenize`: turns text into shards of token ids.

use crate::diagnostics::Report;
use crate::tokenize::{self, Options, Written};
use frit_ir::{Code, Diagnostic, counted};
use frit_runtime::data::matching;
use std::path::PathBuf;

/// Arguments of `frit tokenize`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  frit tokenize --tokenizer tokenizer.json articles.jsonl -o shards
  frit tokenize --tokenizer tokenizer.json 'books/*.txt' --validation 0.01 -o shards
  frit tokenize --tokenizer tokenizer.json chat.jsonl --field content --separator '</s>' -o shards
  frit run plan --data 'shards/train-*.bin' --validation 'shards/validation-*.bin' --steps 1000")]
pub struct Args {
    /// Text files, .jsonl files with one document per line, these compressed with gzip, or quoted patterns.
    #[arg(value_name = "FILE", required = true)]
    pub texts: Vec<PathBuf>,
    /// The tokenizer, as `save_pretrained` of Hugging Face libraries writes it, or its folder.
    #[arg(long, value_name = "TOKENIZER.json")]
    pub tokenizer: PathBuf,
    /// The folder of the shards.
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// The field of a line of .jsonl that has the text.
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub field: String,
    /// Every line of a text file is a document.
    #[arg(long)]
    pub lines: bool,
    /// The token after each document; by default the tokenizer's end of text.
    #[arg(long, value_name = "TOKEN")]
    pub separator: Option<String>,
    /// Tokens of a shard.
    #[arg(long, value_name = "N", default_value_t = 100_000_000, value_parser = shard_tokens)]
    pub shard_tokens: usize,
    /// The fraction of documents that go to shards for validation.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0, value_parser = fraction)]
    pub validation: f64,
}

fn shard_tokens(text: &str) -> Result<usize, String> {
    // A header counts with 32 bits.
    let fits = |n: &usize| (2..=i32::MAX as usize).contains(n);
    text.parse().ok().filter(fits).ok_or_else(|| "give a number from 2 to 2147483647".into())
}

fn fraction(text: &str) -> Result<f64, String> {
    let fits = |x: &f64| (0.0..1.0).contains(x);
    text.parse().ok().filter(fits).ok_or_else(|| "give a number from 0 to below 1".into())
}

/// Runs it.
pub(super) fn execute(args: &Args) -> Result<String, Report> {
    let files = |given: &PathBuf| {
        let refuse = |e| Diagnostic::error(Code::Tokenize, format!("{}: {e}", given.display()));
        matching(given).map_err(refuse)
    };
    let texts: Vec<_> = args.texts.iter().map(files).collect::<Result<_, _>>()?;
    let options = Options {
        tokenizer: args.tokenizer.clone(),
        texts: texts.concat(),
        field: args.field.clone(),
        lines: args.lines,
        separator: args.separator.clone(),
        shard_tokens: args.shard_tokens,
        validation: args.validation,
        folder: args.output.clone(),
    };
    let Written { documents, tokens, shards, separator, vocabulary } =
        tokenize::tokenize(&options)?;
    let mut text = format!(
        "{}, each followed by `{separator}`; {vocabulary} token ids\n",
        counted(documents, "document")
    );
    for (kind, (tokens, shards)) in ["train", "validation"].iter().zip(tokens.iter().zip(&shards)) {
        if let Some(first) = shards.first() {
            let (n, first) = (counted(shards.len(), "shard"), first.display());
            text += &format!("{kind:<11} {tokens} tokens in {n}, the first {first}\n");
        }
    }
    Ok(text)
}

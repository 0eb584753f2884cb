//! Text rollouts: token ids by a Hugging Face `tokenizer.json`.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use crate::error::{Error, Result};

/// A tokenizer and where it came from.
pub(crate) struct TextTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
}

impl TextTokenizer {
    /// Reads the file that the setting `key` names.
    pub fn load(path: &Path, key: &str) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(Error::io("read the tokenizer", path))?;
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| {
            Error::config(
                key,
                format!("expected a tokenizer.json of Hugging Face at {}: {error}", path.display()),
            )
        })?;
        // Whatever the file says of padding and truncation, a text is taken as it is.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| Error::config(key, error.to_string()))?;
        Ok(Self { path: path.to_path_buf(), tokenizer })
    }

    /// Special tokens are recognised where the text spells them out, and none are added.
    pub fn encode(&self, text: &str) -> std::result::Result<Vec<i64>, String> {
        let encoding = self
            .tokenizer
            .encode_fast(text, false)
            .map_err(|error| format!("{} cannot tokenise it: {error}", self.path.display()))?;
        Ok(encoding.get_ids().iter().map(|id| i64::from(*id)).collect())
    }

    /// The text of tokens, special ones too.
    pub fn decode(&self, ids: &[i64]) -> std::result::Result<String, String> {
        // A policy may have more logits than the tokenizer has words; such an id has no text.
        let known: Vec<u32> = ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
        self.tokenizer
            .decode(&known, false)
            .map_err(|error| format!("{} cannot decode {ids:?}: {error}", self.path.display()))
    }
}

//! Blocks that were computed elsewhere.
//!
//! Called through the pool when an engine imports a block.

use starling_ids::{BlockHash, TokenId};

use super::{BlockKey, BlockPool, BlockSlot};

impl BlockPool {
    /// Makes a block known that a sequence elsewhere computed. The slot to write it to, or `None` when it is here already.
    ///
    /// The block is ready once this returns: the caller writes its bytes before anything else happens to the pool.
    pub fn adopt(
        &mut self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        tokens: &[TokenId],
    ) -> Result<Adopted, Refused> {
        if tokens.len() != self.block_tokens {
            return Err(Refused::Length { tokens: tokens.len(), block_tokens: self.block_tokens });
        }
        let parent = match parent {
            Some(hash) => Some(self.known(hash).ok_or(Refused::Orphan(hash))?),
            None => None,
        };
        let key = BlockKey { hash, parent, tokens };
        if let Some(existing) = self.known(hash) {
            return if self.holds(existing, key) { Ok(Adopted::Here) } else { Err(Refused::Collision(hash)) };
        }
        // The parent must not be the block that makes room.
        if let Some(parent) = parent {
            self.hold(parent);
        }
        let slot = self.allocate();
        if let Some(slot) = slot {
            self.register(slot, key);
            self.blocks[slot.0 as usize].used = self.tick;
            self.list(slot);
        }
        if let Some(parent) = parent {
            self.release(parent);
        }
        slot.map(Adopted::Write).ok_or(Refused::NoRoom)
    }
}

/// Where a block from elsewhere goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adopted {
    /// Write its bytes to this slot.
    Write(BlockSlot),
    /// The pool holds this content already.
    Here,
}

/// Why a block from elsewhere is not taken; nothing changed, except that room may have been made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not one block of tokens.
    #[error("block has {tokens} tokens, this pool's blocks have {block_tokens}")]
    Length {
        /// Tokens in the block.
        tokens: usize,
        /// Tokens per block here.
        block_tokens: usize,
    },
    /// The block before it is not known here.
    #[error("the block before it, {0}, is not here")]
    Orphan(BlockHash),
    /// Another content has this hash.
    #[error("hash {0} names another content here")]
    Collision(BlockHash),
    /// All blocks are in use.
    #[error("every block is in use")]
    NoRoom,
}

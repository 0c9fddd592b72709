"""Why a job ended: the first cause told apart from the cascade that follows it."""
